"""InputColumn: what a raw column of a trained model is, for all that take columns from elsewhere than files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.fitting.inputs import Inputs


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
    layout, fitted, widths = inputs.layout, inputs.fitted, {c.column: c.width for c in inputs.layout.dense}
    entries = {name: group.separator for group in layout.sequences.values() for name in group.columns}
    weighed = {c.weights: c.separator for c in reversed(layout.sparse)}  # weights have the separator of their ids
    separators = weighed | {c.column: c.separator for c in layout.sparse} | entries

    def column(name: str) -> InputColumn:
        role: Literal["dense", "ids", "weights", "numbers"] = "weights" if name in weighed else "dense"
        role = "ids" if name in layout.sharing else "numbers" if name in entries else role
        kind, brackets = fitted.kinds.get(name), fitted.brackets.get(name, False)
        several = name in fitted.lists or name in entries or role == "weights"
        found = InputColumn(name, role, widths.get(name), None, several, separators.get(name))
        return found if role in ("dense", "weights") else replace(found, kind=kind, brackets=brackets)

    return tuple(map(column, inputs.columns()))
