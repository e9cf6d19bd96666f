"""InputColumn: what a raw column of a trained model is, for all that take columns from elsewhere than files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.inputs import Inputs


@dataclass(frozen=True, slots=True)
class InputColumn:
    """A raw column that a model reads.

    Attributes:
        role: dense = a number, or a vector of `width` numbers; ids = of a feature or a sequence; weights = one for each
            id of a feature; numbers = one for each entry of a sequence.
        kind: What ids held in training, where known.
        several: Whether a row has any number of values.
        separator: Between the values of a text; None = they are a list.
        brackets: Whether texts are lists in brackets.
    """

    name: str
    role: Literal["dense", "ids", "weights", "numbers"]
    width: int | None = None
    kind: Kind | None = None
    several: bool = False
    separator: str | None = None
    brackets: bool = False


def input_columns(inputs: Inputs) -> tuple[InputColumn, ...]:
    """What the columns of `inputs.columns()` are, in that order."""
    layout, fitted = inputs.layout, inputs.fitted
    widths, ids = {c.column: c.width for c in layout.dense}, {c.column: c for c in layout.sparse}
    weighed = {c.weights: c.separator for c in reversed(layout.sparse)}

    separators = {name: group.separator for group in layout.sequences.values() for name in group.columns}

    def column(name: str) -> InputColumn:
        width = widths.get(name)
        if name in separators:
            role: Literal["ids", "numbers"] = "ids" if name in layout.categories else "numbers"
            kind, brackets = fitted.kinds.get(name), name in fitted.brackets
            return InputColumn(name, role, None, kind, True, separators[name], brackets)
        if name in ids:
            kind, several, brackets = fitted.kinds.get(name), name in fitted.lists, name in fitted.brackets
            return InputColumn(name, "ids", width, kind, several, ids[name].separator, brackets)
        if name in weighed:  # weights have the separator of their ids
            return InputColumn(name, "weights", width, several=True, separator=weighed[name])
        return InputColumn(name, "dense", width)

    return tuple(map(column, inputs.columns()))
