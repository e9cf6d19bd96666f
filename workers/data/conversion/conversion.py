"""From chunks of raw columns to columnar samples: the split, statistics, checks. Knows no file format.

N = rows of a chunk, V = entries of a column, T = distinct times
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.arrays import Bytes, Float64s, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.batch import DecodedRows
from shardkeep.workers.data.columnar import ColumnarWriter, record_batch
from shardkeep.workers.data.conversion.categories import Kind, decode_ids
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.decoding import list_lengths
from shardkeep.workers.data.conversion.labels import Absent, LabelValues, PartCheck, Unlabelled, add_missing
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit
from shardkeep.workers.data.conversion.reader import RowReader
from shardkeep.workers.data.conversion.rules import ReadingRules, is_list
from shardkeep.workers.data.gather_kernels import fold, part
from shardkeep.workers.data.schema import NO_LABEL
from shardkeep.workers.data_config import LabelColumn
from shardkeep.workers.split_config import RANDOM, TIME, SplitRecord

SIDES = ("training", "evaluation", "test")
TRAIN, EVAL, TEST = range(len(SIDES))
"""The numbers of the sides of a split."""


@dataclass
class Split:
    """Finds the side of each row by its values and the seed, alike in any form and order of files.

    `layout`: the columns of a sample."""

    record: SplitRecord
    layout: ColumnLayout
    _reader: RowReader | None = None
    _seen: frozenset[float] = frozenset()  # up to two values

    @property
    def columns(self) -> list[str]:
        """The columns that it reads besides those of a sample."""
        return {RANDOM: [], TIME: [self.layout.time or ""]}.get(self.record.by, [self.record.by])

    @property
    def sides(self) -> list[int]:
        """The sides that get rows."""
        return [TRAIN, *(side for side, share in ((EVAL, self.record.eval), (TEST, self.record.test)) if share)]

    @property
    def advice(self) -> str:
        """What a message about a side without rows or labels adds."""
        alike = "; all rows have one value, so that none can be held out" if len(self._seen) == 1 else ""
        return f" ({self.record}{alike})"

    def fit(self, read: Callable[[Sequence[str]], Iterable[Chunk]]) -> None:
        """Finds the borders of a split by time, unless they are known. `read`: reads columns of all rows.

        Holds 16 bytes a row meanwhile. Raises DataError for a missing time."""
        if self.record.by == TIME and self.record.borders is None:
            chunks = itertools.chain.from_iterable(chunk.parts() for chunk in read(self.columns))
            borders = _borders(np.concatenate([np.empty(0), *map(self._times, chunks)]), self.record)
            self.record = self.record.model_copy(update={"borders": borders})

    def sides_of(self, chunk: Chunk, label_N: LabelValues) -> Bytes:
        """The side of each row, uint8 (N,). Raises DataError for what cannot be read."""
        record, side_N = self.record, np.zeros(len(chunk), np.uint8)
        if record.borders is not None:
            time_N = self._times(chunk)
            for side, border in zip((EVAL, TEST), record.borders, strict=True):
                side_N[time_N >= (np.inf if border is None else border)] = side
            return side_N
        if record.by == RANDOM:
            self._reader = self._reader or _plain_reader(self.layout, chunk)
            value_N = _hashed(self._reader.rows(chunk, label_N, learn=False))
        else:  # the number 7 and the text 7 are one value
            column = chunk.column(record.by)
            with column.named():
                value_N = decode_ids(column, "texts", ReadingRules(self.layout.missing))
        self._see(value_N)
        key = np.uint64(xxhash.xxh3_64_intdigest(b"split", seed=record.seed))
        part(key, value_N, record.eval, record.test, side_N)
        return side_N

    def _see(self, value_N: Ints | Float64s) -> None:
        if len(self._seen) < 2:
            self._seen |= frozenset(np.unique(value_N)[:2].tolist())

    def _times(self, chunk: Chunk) -> Float64s:
        self._reader = self._reader or RowReader(self.layout)
        time_N = self._reader.times(chunk)
        self._see(time_N)
        return time_N


def _plain_reader(layout: ColumnLayout, chunk: Chunk) -> RowReader:
    """Reads columns by name, numbers as they are, and categories as texts: alike in every form of a table."""
    dense = [column.model_copy(update={"scale": "none"}) for column in layout.dense]
    layout = replace(
        layout,
        dense=tuple(sorted(dense, key=lambda column: column.column)),
        sparse=tuple(sorted(layout.sparse, key=lambda column: column.column)),
        sequences={n: group.model_copy(update={"numbers": []}) for n, group in sorted(layout.sequences.items())},
        scale="none",
        time=None,
    )
    stamps, none = (
        {n for n in layout.categories if pa.types.is_timestamp(chunk.column(n).values.type)},
        frozenset[str](),
    )
    kinds: dict[str, Kind] = {name: "times" if name in stamps else "texts" for name in layout.categories}
    return RowReader(layout, prior=PriorFit(none, none, none, kinds, {}))


def _hashed(rows: DecodedRows) -> Ints:
    """A hash of each row's label, weight, ids and numbers, int64 (N,)."""
    hash_N = np.zeros(len(rows), np.uint64)
    for column in record_batch(rows).columns:
        lists = is_list(column.type)
        lengths_N = list_lengths(column) if lists else np.ones(len(rows), np.int64)
        values_V = np.array(column.flatten() if lists else column)
        if values_V.dtype != np.int64:  # one zero, one NaN
            values_V = np.where(np.isnan(values_V), np.nan, values_V + 0.0).astype(np.float64).view(np.int64)
        fold(hash_N, lengths_N, values_V)
    return hash_N.view(np.int64)


def _borders(time_N: Float64s, record: SplitRecord) -> tuple[float | None, float | None]:
    """The oldest time of evaluation and that of the test; None = it has no rows.

    Each takes whole times, newest first, until it has its share: rows of the time at a border are on the newer side."""
    times_T, count_T = np.unique(time_N, return_counts=True)
    newer_T, taken, borders = np.cumsum(count_T[::-1]), 0, list[float | None]()  # rows of a time and of newer ones
    for share in (record.test, record.eval) if len(times_T) else ():
        rows = taken + share * len(time_N) - 1e-9  # a tenth of 30 rows is 3, in floats as well
        place = min(int(np.searchsorted(newer_T, rows)), len(times_T) - 1)
        taken = int(newer_T[place]) if share else taken
        borders.append(float(times_T[-1 - place]) if share else None)
    return (borders[1], borders[0]) if borders else (None, None)


class Converter:
    """Turns chunks into samples: those of `train` first, or with what an earlier conversion of `train` has fitted.

    `prior`: the part that another model's training rows have fitted. `split`: finds the side of each row."""

    def __init__(
        self,
        layout: ColumnLayout,
        fitted: Fitted | None = None,
        prior: PriorFit | None = None,
        split: Split | None = None,
    ) -> None:
        self.reader = RowReader(layout, fitted, prior)
        self.skipped = 0
        self._absent = Absent(layout.labels, layout.rules)
        self._labels = layout.labels
        self._split = split
        self._checked = layout.labels or (LabelColumn(column=NO_LABEL, kind="number"),)  # of which rows are counted

    @property
    def absent(self) -> dict[str, str]:
        """Values that mean 1, and that no row has had yet, with what their column holds."""
        return self._absent.described()

    @property
    def fitted(self) -> Fitted:
        """What the training rows have decided, and how they were chosen."""
        return replace(self.reader.fitted(), split=None if self._split is None else self._split.record)

    def convert(self, chunks: Iterable[Chunk], writers: Mapping[int, ColumnarWriter], *, origin: str = "") -> None:
        """Writes every row to the writer of its side: that which the split finds, or the only one.

        Only rows of training enter the statistics. `origin` names the input where it turns out to be empty.
        Raises DataError for what cannot be a sample.
        """
        split = self._split
        checks = {side: [PartCheck(SIDES[side]) for _ in self._checked] for side in writers}
        row, unlabelled = 0, [Unlabelled(label) for label in self._labels]
        for chunk in itertools.chain.from_iterable(chunk.parts() for chunk in chunks):
            row += len(chunk)
            labels = self.reader.labels(chunk)
            self._absent.see(chunk)
            if add_missing(unlabelled, chunk, labels):
                continue  # an error already: only counts
            kept_N = labels.kept(self._labels)
            side_N = np.full(len(chunk), min(writers)) if split is None else split.sides_of(chunk, labels.value_N)
            for side, writer in writers.items():
                own_N = (side_N == side) & kept_N
                if own_N.any():
                    part = chunk.filter(own_N)
                    rows = self.reader.rows(part, labels.value_N[own_N], learn=side == TRAIN)
                    self._check(checks[side], rows.label_N, part)
                    writer.add(rows)
        if not row:
            raise DataError(f"{origin or 'the data'}: has no rows")
        for one in unlabelled:
            one.finish(row)
            self.skipped += one.count if one.label.missing == "skip" else 0
        for part_checks in checks.values():
            self._finish(part_checks, split.advice if split is not None else "")

    def _finish(self, checks: Sequence[PartCheck], advice: str) -> None:
        for check, label in zip(checks, self._checked, strict=True):
            check.finish(label, advice)

    def _check(self, checks: Sequence[PartCheck], label_N: LabelValues, part: Chunk) -> None:
        columns = label_N.T if label_N.ndim == 2 else [label_N]
        for check, values_N, label in zip(checks, columns, self._checked, strict=True):
            check.add(values_N, part, label)
