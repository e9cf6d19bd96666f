"""Labels: raw columns to 0 and 1, missing ones, and the check that both classes are there.

N = rows of a chunk
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.rules import (
    ReadingRules,
    Rules,
    are_listed,
    canonical,
    is_number,
    is_text,
    listing,
    numbers_of,
)
from shardkeep.workers.data.schema import NO_LABEL
from shardkeep.workers.data_config import LabelColumn, TaskColumn, Threshold

if TYPE_CHECKING:
    from shardkeep.workers.data.columns.column import StoredColumn  # loads kernels

AnyLabel = LabelColumn | TaskColumn
MAX_SHOWN = 10
"""Values of a column in a message."""
_SKIPS = "skip leaves such rows out"
_BARE = ReadingRules(("",))


@dataclass(frozen=True)
class Labels:
    """The labels of rows.

    Attributes:
        value_N: float32, of several labels (N, T); NaN = the row has none.
        missing_NT: bool, where a row lacks a label that it should have.
    """

    value_N: Floats
    missing_NT: Bools

    def kept(self, labels: Sequence[AnyLabel]) -> Bools:
        """Which rows are samples, bool (N,): those that lack no label whose rows are skipped."""
        skipped = [label.missing == "skip" for label in labels]
        lacking_N: Bools = self.missing_NT[:, skipped].max(axis=1, initial=False)
        return ~lacking_N


def decode_labels(chunk: Chunk, labels: Sequence[AnyLabel], rules: Rules) -> Labels:
    """The labels of a chunk; 1 of all rows where there is no label. One is masked where the label that is `given` is
    not 1.

    Raises DataError, naming the row, as `_decoded`, and for a 1 `after` a label that is 0."""
    found = []
    for label in labels:
        column = chunk.column(label.column)
        with column.named():
            found.append(_decoded(column, label, rules(label.column)))
    if not found:
        return Labels(np.ones(len(chunk), np.float32), np.zeros((len(chunk), 0), np.bool_))
    value_NT = np.stack(found, axis=1)
    missing_NT = np.isnan(value_NT)
    if len(found) == 1:
        return Labels(value_NT[:, 0], missing_NT)
    names = [label.column for label in labels]
    for t, label in enumerate(labels):
        if isinstance(label, TaskColumn) and label.given is not None:
            outside_N = value_NT[:, names.index(label.given)] != 1.0
            value_NT[outside_N, t], missing_NT[outside_N, t] = np.nan, False
        if isinstance(label, TaskColumn) and label.after is not None:
            alone_N = (value_NT[:, t] == 1.0) & (value_NT[:, names.index(label.after)] == 0.0)
            if label.missing != "mask":
                problem = f"is 1 and {label.after} is 0, without which it does not happen (after: {label.after})"
                chunk.column(label.column).check(alone_N, f"{problem}; allowed: missing: mask, or mend the data")
            value_NT[alone_N, t] = np.nan
    return Labels(value_NT, missing_NT)


def _decoded(column: Column, label: AnyLabel, rules: ReadingRules) -> Floats:
    """A label, NaN = missing; a value of `missing` that `positive` lists too is no missing one.

    Raises DataError, naming the row, for one that is not 0 or 1, or that is not a number.
    """
    if isinstance(label.positive, Threshold):
        numbers_N, above, below = decode_numbers(column, rules), label.positive.above, label.positive.below
        is_within_N = (numbers_N > (-np.inf if above is None else above)) & (
            numbers_N < (np.inf if below is None else below)
        )
        return _labels(is_within_N, np.isnan(numbers_N))
    if label.positive is not None:
        positive = listed(label)
        is_positive = listing(positive, column.decimal)
        marks = (mark for mark in rules.missing if not is_positive(canonical(mark.encode())))
        bare = replace(rules, missing=("", *marks))
        value_N = _positives(column, positive, bare)
        rules.removed = bare.removed
        return value_N
    if label.kind == "number":
        with np.errstate(over="ignore"):
            value_N = decode_numbers(column, rules).astype(np.float32)
        column.check(np.isinf(value_N), "the label is beyond float32")
        return value_N
    try:
        numbers_N = decode_numbers(column, rules)
    except DataError as error:
        raise DataError(f"{error} (label; name the values that mean 1 in {_key(label)}.positive)") from error
    several = isinstance(label, TaskColumn)
    allowed = f"0 and 1, {_key(label)}.positive, or {_key(label) if several else 'train'}.loss: mse for numbers"
    wrong_N = ~((numbers_N == 0.0) | (numbers_N == 1.0) | np.isnan(numbers_N))
    column.check(wrong_N, lambda index: f"the label is {numbers_N[index]:g}; allowed: {allowed}")
    return np.abs(numbers_N).astype(np.float32)


def _labels(is_one_N: Bools, missing_N: Bools) -> Floats:
    return np.where(missing_N, np.float32(np.nan), is_one_N.astype(np.float32))


def _key(label: AnyLabel) -> str:
    """The setting of a label, as a message names it."""
    return f"data.labels.{label.column}" if isinstance(label, TaskColumn) else "data.label"


def listed(label: AnyLabel) -> tuple[str, ...]:
    """The values that mean 1, where the label lists them."""
    return tuple(text.strip() for text in label.positive) if isinstance(label.positive, list) else ()


def absent(column: Column, values: Sequence[str]) -> list[str]:
    """Those of some values that mean 1 that no row of a column has."""
    return [value for value in values if not (_positives(column, [value], _BARE) == 1).any()]


def add_distinct(seen: dict[str, None], column: Column) -> None:
    """Adds the first few distinct texts of a column, for a message."""
    if len(seen) < MAX_SHOWN:
        texts = pc.unique(_texts(column, _BARE).slice(0, 10_000)).cast(pa.large_binary()).to_pylist()
        shown = ("None" if text is None else text.decode("utf-8", "replace") for text in texts)
        seen |= dict.fromkeys(itertools.islice(shown, MAX_SHOWN - len(seen)))


def check_matched(labels: Sequence[AnyLabel], facts: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError for a value that means 1 and that no row has: one that is misspelt makes labels of 0 of all.
    `facts`: those of the stored labels, of training files and maybe of evaluation files."""
    for label in labels:
        for value in facts[0]["absent"][label.column]:
            if all(value in each["absent"][label.column] for each in facts):
                shown = ", ".join(map(repr, facts[0]["held"][label.column]))
                where = f"no row of the data has {value!r}; column {label.column} holds {shown}"
                raise DataError(f"{_key(label)}.positive: {where}")


def _positives(column: Column, positive: Sequence[str], rules: ReadingRules) -> Floats:
    """A number among `positive` is compared by value, but as a text where float64 has no odd ones; so is any other."""
    numbers = [number for number in numbers_of(positive, column.decimal) if abs(number) < 1 << 53]
    kind = column.values.type
    if is_number(kind) and len(numbers) == len(positive):
        numbers_N = decode_numbers(column, rules)
        held = np.array(numbers, kind.to_pandas_dtype() if pa.types.is_floating(kind) else None)  # .1 as it is there
        return _labels(np.isin(numbers_N, held), np.isnan(numbers_N))
    texts = _texts(column, rules)
    return _labels(np.array(are_listed(texts, positive, column.decimal)), np.array(texts.is_null()))


def check_side(side: str, labels: Sequence[AnyLabel], column: StoredColumn, rows_N: Ints | None, advice: str) -> None:
    """Raises DataError where a side has no rows or one class. `rows_N`: its rows, None = all; `advice`: what the
    message adds."""
    value_NT = column.values if rows_N is None else column.values[rows_N]
    for t, label in enumerate(labels or (LabelColumn(column=NO_LABEL, kind="number"),)):
        value_N = value_NT if value_NT.ndim == 1 else value_NT[:, t]
        value_N = value_N[~np.isnan(value_N)]
        if not len(value_N):
            what = f"row with the label {label.column}" if isinstance(label, TaskColumn) else "rows"
            raise DataError(f"the {side} data has no {what}{advice}")
        if label.kind == "class" and (value_N == value_N[0]).all():
            hint = f"; check {_key(label)}.positive" if label.positive is not None else ""
            held = ", ".join(map(repr, column.facts["held"][label.column]))
            raise DataError(
                f"label column {label.column}: all {len(value_N)} rows of the {side} data are class {value_N[0]:g} "
                f"(the column holds {held}); both classes are needed{hint}{advice}"
            )


def _texts(column: Column, rules: ReadingRules) -> pa.Array:
    """The labels as texts without spaces around them, which `positive` is compared with; missing ones are null."""
    kind = column.values.type
    if not (is_text(kind) or is_number(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind)):
        raise column.wrong_type("numbers, truth values or texts")
    return rules.texts(column.values)


def missing_error(label: AnyLabel, first: DataError | str, count: int, num_rows: int) -> DataError:
    """The error for labels that are missing. `first`: that of the first one."""
    way = "mask counts such rows for the other labels" if isinstance(label, TaskColumn) else _SKIPS
    advice = f"; {_key(label)}.missing: {way}" if label.missing == "error" else ""
    return DataError(f"{first} ({count:,} of {num_rows:,} rows){advice}")
