"""Labels: raw columns to 0 and 1, missing ones, and the check that both classes are there.

N = rows of a chunk
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from shardkeep.workers.data_config import LabelColumn, TaskColumn, Threshold

LabelValues = NDArray[np.uint8] | NDArray[np.float32]
AnyLabel = LabelColumn | TaskColumn
MAX_SHOWN = 10
"""Values of a column in a message."""
_SKIPS = "skip leaves such rows out"


@dataclass(frozen=True)
class Labels:
    """The labels of rows.

    Attributes:
        value_N: uint8, 0 and 1, or float32, any number; of several labels float32 (N, T), NaN = the row has no such
            label.
        missing_NT: bool, where a row lacks a label that it should have; the value of a single label means nothing
            there.
    """

    value_N: LabelValues
    missing_NT: NDArray[np.bool_]

    def kept(self, labels: Sequence[AnyLabel]) -> NDArray[np.bool_]:
        """Which rows are samples, bool (N,): those that lack no label whose rows are skipped."""
        skipped = [label.missing == "skip" for label in labels]
        lacking_N: NDArray[np.bool_] = self.missing_NT[:, skipped].max(axis=1, initial=False)
        return ~lacking_N


def decode_labels(chunk: Chunk, labels: Sequence[AnyLabel], rules: ReadingRules) -> Labels:
    """The labels of a chunk; 1 of all rows where there is no label. One is masked where the label that is `given` is
    not 1.

    Raises DataError, naming the row, as `_decoded`, and for a 1 `after` a label that is 0."""
    found = []
    for label in labels:
        column = chunk.column(label.column)
        with column.named():
            found.append(_decoded(column, label, rules))
    if not found:
        return Labels(np.ones(len(chunk), np.uint8), np.zeros((len(chunk), 0), np.bool_))
    if len(found) == 1:
        return Labels(found[0].value_N, found[0].missing_N[:, None])
    missing_NT = np.stack([one.missing_N for one in found], axis=1)
    value_NT = np.stack([one.value_N for one in found], axis=1).astype(np.float32)
    value_NT[missing_NT] = np.nan
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


@dataclass(frozen=True)
class _Decoded:
    """One label: value_N as of `Labels`; missing_N: bool, where there is none."""

    value_N: LabelValues
    missing_N: NDArray[np.bool_]


def _decoded(column: Column, label: AnyLabel, rules: ReadingRules) -> _Decoded:
    """A label; a value of `missing` that `positive` lists too is no missing one.

    Raises DataError, naming the row, for one that is not 0 or 1, or that is not a number.
    """
    if isinstance(label.positive, Threshold):
        numbers_N = decode_numbers(column, rules)
        return _Decoded(_within(label.positive, numbers_N).astype(np.uint8), np.isnan(numbers_N))
    if label.positive is not None:
        positive = listed(label)
        numbers, point = numbers_of(positive, column.decimal), column.decimal
        missing = tuple(m for m in rules.missing if m not in positive and number_of(m.encode(), point) not in numbers)
        return _positives(column, positive, replace(rules, missing=missing))
    if label.kind == "number":
        return _numbers(column, rules)
    try:
        numbers_N = decode_numbers(column, rules)
    except DataError as error:
        raise DataError(f"{error} (label; name the values that mean 1 in {_key(label)}.positive)") from error
    missing_N = np.isnan(numbers_N)
    several = isinstance(label, TaskColumn)
    allowed = f"0 and 1, {_key(label)}.positive, or {_key(label) if several else 'train'}.loss: mse for numbers"
    wrong_N = ~((numbers_N == 0.0) | (numbers_N == 1.0) | missing_N)
    column.check(wrong_N, lambda index: f"the label is {numbers_N[index]:g}; allowed: {allowed}")
    return _Decoded((numbers_N == 1.0).astype(np.uint8), missing_N)


def no_labels(labels: Sequence[AnyLabel], num_rows: int) -> LabelValues:
    """Labels for rows that are only scored: 0."""
    return np.zeros(num_rows, np.uint8) if len(labels) <= 1 else np.zeros((num_rows, len(labels)), np.float32)


def _key(label: AnyLabel) -> str:
    """The setting of a label, as a message names it."""
    return f"data.labels.{label.column}" if isinstance(label, TaskColumn) else "data.label"


def listed(label: AnyLabel) -> tuple[str, ...]:
    """The values that mean 1, where the label lists them."""
    return tuple(text.strip() for text in label.positive) if isinstance(label.positive, list) else ()


@dataclass
class Absent:
    """Values that mean 1, and that no row has had yet, by the column of their label."""

    labels: Sequence[AnyLabel]
    rules: ReadingRules
    values: dict[str, list[str]] = field(init=False)
    seen: defaultdict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.values = {label.column: list(listed(label)) for label in self.labels}

    def see(self, chunk: Chunk) -> None:
        """Takes in the rows of a chunk."""
        bare = replace(self.rules, missing=())
        for name, values in self.values.items():
            column = chunk.column(name)
            self.values[name] = [value for value in values if not _positives(column, [value], bare).value_N.any()]
            if self.values[name]:
                add_distinct(self.seen[name], column)

    def described(self) -> dict[str, str]:
        """The values, of several labels behind their label's name, and what the label's column holds."""
        several = len(self.labels) > 1
        return {
            f"{name}: {value}" if several else value: f"column {name} holds {', '.join(map(repr, self.seen[name]))}"
            for name, values in self.values.items()
            for value in values
        }


def add_distinct(seen: dict[str, None], column: Column) -> None:
    """Adds the first few distinct texts of a column, for a message."""
    if len(seen) < MAX_SHOWN:
        texts = pc.unique(label_texts(column, ReadingRules()).slice(0, 10_000)).cast(pa.large_binary()).to_pylist()
        shown = ("None" if text is None else text.decode("utf-8", "replace") for text in texts)
        seen |= dict.fromkeys(itertools.islice(shown, MAX_SHOWN - len(seen)))


def check_matched(absent: Mapping[str, str], where: str, labels: Sequence[AnyLabel]) -> None:
    """Raises DataError for values that mean 1 and that no row has: one that is misspelt makes labels of 0 of all."""
    for value, held in absent.items():
        label = next((each for each in labels if value.startswith(f"{each.column}: ")), labels[0])
        key = _key(label)
        value = value.removeprefix(f"{label.column}: ") if isinstance(label, TaskColumn) else value
        raise DataError(f"{key}.positive: no row of {where} has {value!r}; {held}")


def left_out(count: int) -> str:
    """What a person learns of rows without a label, behind where the samples come from."""
    return f"; {count:,} rows left out, their label is missing" if count else ""


def _within(bounds: Threshold, numbers_N: Float64s) -> NDArray[np.bool_]:
    """Which numbers are within the bounds; NaN is not."""
    above, below = bounds.above, bounds.below
    return (numbers_N > (-np.inf if above is None else above)) & (numbers_N < (np.inf if below is None else below))


def _numbers(column: Column, rules: ReadingRules) -> _Decoded:
    numbers_N = decode_numbers(column, rules)
    with np.errstate(over="ignore"):
        value_N = numbers_N.astype(np.float32)
    column.check(np.isinf(value_N), "the label is beyond float32")
    return _Decoded(value_N, np.isnan(numbers_N))


def _positives(column: Column, positive: Sequence[str], rules: ReadingRules) -> _Decoded:
    """A number among `positive` is compared by value, but as a text where float64 has no odd ones; so is any other."""
    numbers = [number for number in numbers_of(positive, column.decimal) if abs(number) < 1 << 53]
    kind = column.values.type
    if is_number(kind) and len(numbers) == len(positive):
        numbers_N = decode_numbers(column, rules)
        held = np.array(numbers, kind.to_pandas_dtype() if pa.types.is_floating(kind) else None)  # .1 as it is there
        return _Decoded(np.isin(numbers_N, held).astype(np.uint8), np.isnan(numbers_N))
    texts = label_texts(column, rules)
    positive_N = np.array(pc.is_in(texts, value_set=pa.array(positive, texts.type)))
    positive_N |= np.array(equal_to(texts, numbers, column.decimal))
    return _Decoded(positive_N.astype(np.uint8), np.array(texts.is_null()))


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

    def add(self, labels_N: LabelValues, chunk: Chunk, label: AnyLabel) -> None:
        """Counts a chunk's labels, those that are not NaN, and remembers the first few texts for the error message."""
        labels_N = labels_N[~np.isnan(labels_N)] if labels_N.dtype == np.float32 else labels_N
        self.num_rows += len(labels_N)
        if label.kind == "number":
            return
        self.num_positive += int(labels_N.sum())
        add_distinct(self.seen, chunk.column(label.column))

    def finish(self, label: AnyLabel, advice: str = "") -> None:
        """Raises DataError where the part has no rows or one class."""
        if not self.num_rows:
            what = f"row with the label {label.column}" if isinstance(label, TaskColumn) else "rows"
            raise DataError(f"the {self.name} data has no {what}{advice}")
        if label.kind == "class" and self.num_positive in (0, self.num_rows):
            value = 1 if self.num_positive else 0
            held = ", ".join(map(repr, self.seen))
            hint = f"; check {_key(label)}.positive" if label.positive is not None else ""
            raise DataError(
                f"label column {label.column}: all {self.num_rows} rows of the {self.name} data are class {value} "
                f"(the column holds {held}); both classes are needed{hint}{advice}"
            )


@dataclass
class Unlabelled:
    """Counts the rows whose label is missing, which are an error or left out."""

    label: AnyLabel
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
            way = "mask counts such rows for the other labels" if isinstance(self.label, TaskColumn) else _SKIPS
            known = f"; {_key(self.label)}.missing: {way}" if self.label.missing == "error" else ""
            raise DataError(f"{self.first} ({self.count:,} of {num_rows:,} rows){known}")


def add_missing(unlabelled: Sequence[Unlabelled], chunk: Chunk, labels: Labels) -> bool:
    """Counts the missing labels of a chunk; whether those so far are an error."""
    return any([one.add(chunk, missing_N) for one, missing_N in zip(unlabelled, labels.missing_NT.T, strict=True)])  # noqa: C419 - all count
