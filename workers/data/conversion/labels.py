"""Labels: raw columns to 0 and 1, missing ones, and the check that both classes are there.

N = rows of a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.rules import ReadingRules, equal_to, is_number, is_text, number_of, numbers_of
from shardkeep.workers.data_config import LabelColumn, Threshold

LabelValues = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True)
class Labels:
    """value_N: uint8, 0 and 1, or float32, any number; missing_N: bool, where there is no label, and the value means
    nothing."""

    value_N: LabelValues
    missing_N: NDArray[np.bool_]


def decode_labels(column: Column, label: LabelColumn, rules: ReadingRules) -> Labels:
    """The labels; a value of `missing` that `positive` lists too is no missing one.

    Raises DataError, naming the row, for one that is not 0 or 1, or that is not a number.
    """
    if isinstance(label.positive, Threshold):
        numbers_N = decode_numbers(column, rules)
        return Labels(_within(label.positive, numbers_N).astype(np.uint8), np.isnan(numbers_N))
    if label.positive is not None:
        positive = listed(label)
        numbers = numbers_of(positive) if rules.form > 1 else []
        missing = tuple(m for m in rules.missing if m not in positive and number_of(m.encode()) not in numbers)
        return _positives(column, positive, replace(rules, missing=missing))
    if label.kind == "number":
        return _numbers(column, rules)
    try:
        numbers_N = decode_numbers(column, rules)
    except DataError as error:
        raise DataError(f"{error} (label; name the values that mean 1 in data.label.positive)") from error
    missing_N = np.isnan(numbers_N)
    allowed = "0 and 1, data.label.positive, or train.loss: mse for numbers"
    wrong_N = ~((numbers_N == 0.0) | (numbers_N == 1.0) | missing_N)
    column.check(wrong_N, lambda index: f"the label is {numbers_N[index]:g}; allowed: {allowed}")
    return Labels((numbers_N == 1.0).astype(np.uint8), missing_N)


def listed(label: LabelColumn) -> tuple[str, ...]:
    """The values that mean 1, where the label lists them."""
    return tuple(text.strip() for text in label.positive) if isinstance(label.positive, list) else ()


def unmatched(column: Column, values: Sequence[str], rules: ReadingRules) -> list[str]:
    """Which of the values that mean 1 no row of the column has."""
    bare = replace(rules, missing=())
    return [value for value in values if not _positives(column, [value], bare).value_N.any()]


def check_matched(absent: Sequence[str], where: str) -> None:
    """Raises DataError for values that mean 1 and that no row has: one that is misspelt makes labels of 0 of all."""
    if absent:
        raise DataError(f"data.label.positive: no row of {where} has {absent[0]!r}")


def left_out(count: int) -> str:
    """What a person learns of rows without a label, behind where the samples come from."""
    return f"; {count:,} rows left out, their label is missing" if count else ""


def _within(bounds: Threshold, numbers_N: Float64s) -> NDArray[np.bool_]:
    """Which numbers are within the bounds; NaN is not."""
    above, below = bounds.above, bounds.below
    return (numbers_N > (-np.inf if above is None else above)) & (numbers_N < (np.inf if below is None else below))


def _numbers(column: Column, rules: ReadingRules) -> Labels:
    numbers_N = decode_numbers(column, rules)
    with np.errstate(over="ignore"):
        value_N = numbers_N.astype(np.float32)
    column.check(np.isinf(value_N), "the label is beyond float32")
    return Labels(value_N, np.isnan(numbers_N))


def _positives(column: Column, positive: Sequence[str], rules: ReadingRules) -> Labels:
    """Numbers are compared by value where all of `positive` are numbers, else texts."""
    numbers = numbers_of(positive)
    by_value = len(numbers) == len(positive)
    if is_number(column.values.type) and by_value:
        numbers_N = decode_numbers(column, rules)
        missing_N, positive_N = np.isnan(numbers_N), np.isin(numbers_N, numbers)
    else:
        texts = label_texts(column, rules)
        missing_N = np.array(texts.is_null())
        if by_value and rules.form > 1:
            positive_N = np.array(equal_to(pc.replace_substring(texts, column.decimal, "."), numbers))
        else:
            positive_N = np.array(pc.is_in(texts, value_set=pa.array(positive, texts.type)))
    return Labels(positive_N.astype(np.uint8), missing_N)


def label_texts(column: Column, rules: ReadingRules) -> pa.Array:
    """The labels as stripped texts, the form in which `positive` is compared; missing ones are null."""
    kind = column.values.type
    if not (is_text(kind) or is_number(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind)):
        raise column.wrong_type("numbers, truth values or texts")
    values = column.values if is_text(kind) else column.values.cast(pa.string())
    return replace(rules, missing=("", *rules.missing)).texts(values)


@dataclass
class PartCheck:
    """Counts rows and labels of one part, so that an empty or one-sided part is refused."""

    name: str
    num_rows: int = 0
    num_positive: int = 0
    seen: dict[str, None] = field(default_factory=dict)

    def add(self, labels_N: LabelValues, chunk: Chunk, label: LabelColumn) -> None:
        """Counts a chunk's labels and remembers the first few texts for the error message."""
        self.num_rows += len(labels_N)
        if label.kind == "number":
            return
        self.num_positive += int(labels_N.sum())
        if len(self.seen) < 10:
            texts = pc.unique(label_texts(chunk.column(label.column), ReadingRules()).slice(0, 10_000))
            self.seen |= dict.fromkeys(str(t) for t in texts.to_pylist())

    def finish(self, label: LabelColumn, advice: str = "") -> None:
        """Raises DataError where the part has no rows or one class."""
        if not self.num_rows:
            raise DataError(f"the {self.name} data has no rows{advice}")
        if label.kind == "class" and self.num_positive in (0, self.num_rows):
            value = 1 if self.num_positive else 0
            held = ", ".join(repr(t) for t in list(self.seen)[:10])
            hint = "; check data.label.positive" if label.positive is not None else ""
            raise DataError(
                f"label column {label.column}: all {self.num_rows} rows of the {self.name} data are class {value} "
                f"(the column holds {held}); both classes are needed{hint}{advice}"
            )


@dataclass
class Unlabelled:
    """Counts the rows whose label is missing, which are an error or left out."""

    label: LabelColumn
    count: int = 0
    first: DataError | None = None

    def add(self, chunk: Chunk, missing_N: NDArray[np.bool_]) -> bool:
        """Takes in a chunk; whether the missing labels so far are an error."""
        self.count += int(missing_N.sum())
        if self.first is None and missing_N.any():
            self.first = chunk.column(self.label.column).error(int(missing_N.argmax()), "the label is missing")
        return self.first is not None and self.label.missing == "error"

    def finish(self, num_rows: int) -> None:
        """Raises DataError where missing labels are an error, and where no row has a label."""
        if self.first is not None and (self.label.missing == "error" or self.count == num_rows):
            known = "; data.label.missing: skip leaves such rows out" if self.label.missing == "error" else ""
            raise DataError(f"{self.first} ({self.count:,} of {num_rows:,} rows){known}")
