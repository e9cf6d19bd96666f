"""Split: the side of each row, by its values and the seed, alike in any form of a table and order of its files.

N = rows, T = distinct times
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Bytes, Float64s, Ints
from shardkeep.workers.data.columns.column import StoredColumn
from shardkeep.workers.data.columns.column_kernels import fold, part
from shardkeep.workers.data.columns.dataset import LABEL, TIME, WEIGHT
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import convert
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_texts
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.reader import IdsReader, LabelReader, Reader, TimeReader, readers_of
from shardkeep.workers.data_config import SparseColumn
from shardkeep.workers.split_config import RANDOM, TIME as BY_TIME, SplitRecord

SIDES = ("training", "evaluation", "test")
TRAIN, EVAL, TEST = range(len(SIDES))
"""The numbers of the sides of a split."""
MAX_TWINS = 0.5
"""Share of rows that equal an earlier one. With more, the held-out labels are those that training lacks."""
_BY, _ROWS = "split", 1 << 16
Columns = Mapping[str, StoredColumn]


class Split:
    """Finds the side of each row. `record`: with the borders of a split by time, once they are known."""

    def __init__(self, record: SplitRecord, layout: ColumnLayout) -> None:
        self.record, self.layout = record, layout
        self._alike, self._twins = False, 0.0

    @property
    def sides(self) -> list[int]:
        """The sides that get rows."""
        return [TRAIN, *(side for side, share in ((EVAL, self.record.eval), (TEST, self.record.test)) if share)]

    @property
    def advice(self) -> str:
        """What a message about a side without rows or labels adds."""
        return f" ({self.record}{'; all rows have one value, so that none can be held out' if self._alike else ''})"

    @property
    def notes(self) -> list[str]:
        """What a person should know of the sides that were found last."""
        equal = f"data.split: {self._twins:.0%} of the rows equal an earlier one, and equal rows are on one side"
        return [f"{equal}. The metrics mislead; split by time or by a column"] if self._twins > MAX_TWINS else []

    def readers(self, known: Fitted) -> list[Reader]:
        """The readers of what decides the side of a row."""
        by = self.record.by
        if by == BY_TIME:
            return [TimeReader(self.layout, known)]
        if by == RANDOM:
            return readers_of(replace(self.layout, time=None), known)
        texts = Fitted(kinds={by: "texts"})  # the number 7 and the text 7 are one value
        return [LabelReader(self.layout, known), IdsReader(self.layout, SparseColumn(column=by), texts, name=_BY)]

    def parted(self, chunks: Iterable[Chunk], known: Fitted) -> Bytes:
        """As `sides_of`, of the rows of chunks. Raises DataError for what cannot be read."""
        return self.sides_of(convert(chunks, self.readers(known)), known)

    def sides_of(self, columns: Columns, fitted: Fitted) -> Bytes:
        """The side of each row, uint8 (N,). `fitted`: what is decided of the columns."""
        record, count = self.record, len(next(iter(columns.values())))
        side_N = np.zeros(count, np.uint8)
        if record.by == BY_TIME:
            time_N = columns[TIME].values.astype(np.float64)
            self._alike = count > 0 and bool((time_N == time_N[0]).all())
            if record.borders is None:
                record = self.record = record.model_copy(update={"borders": _borders(time_N, record)})
            assert record.borders is not None
            for side, border in zip((EVAL, TEST), record.borders, strict=True):
                side_N[time_N >= (np.inf if border is None else border)] = side
            return side_N
        value_N = np.empty(count, np.int64)
        for start in range(0, count, _ROWS):
            rows_N = np.arange(start, min(start + _ROWS, count))
            value_N[rows_N] = self._values(columns, rows_N, fitted)
        self._alike = count > 0 and bool((value_N == value_N[0]).all())
        if record.by == RANDOM and count:
            some_M = value_N[value_N % max(1, count >> 16) == 0]  # all rows of some values
            self._twins = 1 - len(np.unique(some_M)) / max(1, len(some_M))
        part(np.uint64(xxhash.xxh3_64_intdigest(b"split", seed=record.seed)), value_N, record.eval, record.test, side_N)
        return side_N

    def _values(self, columns: Columns, rows_N: Ints, fitted: Fitted) -> Ints:
        if self.record.by != RANDOM:
            return columns[_BY].ids(rows_N)
        hash_N = np.zeros(len(rows_N), np.uint64)
        for lengths_N, values_V in self._of_rows(columns, rows_N, fitted):
            if values_V.dtype != np.int64:  # one zero, one NaN
                values_V = np.where(np.isnan(values_V), np.nan, values_V + 0.0).astype(np.float64).view(np.int64)
            fold(hash_N, lengths_N, np.ascontiguousarray(values_V.reshape(-1)))
        return hash_N.view(np.int64)

    def _of_rows(self, columns: Columns, rows_N: Ints, fitted: Fitted) -> Iterator[tuple[Ints, NDArray[Any]]]:
        """How many values each row has, and the values, of all columns: ids as those of texts, numbers as float32."""
        layout, ones_N = self.layout, np.ones(len(rows_N), np.int64)
        scalars = [columns[name].values[rows_N].astype(np.float32) for name in (LABEL, WEIGHT) if name in columns]
        blocks: list[NDArray[Any]] = sorted(scalars, key=np.ndim)  # several labels come last
        if dense := [columns[f"numbers:{name}"].values[rows_N] for name in sorted(c.column for c in layout.dense)]:
            blocks.append(np.column_stack(dense).astype(np.float32))
        sparse = sorted(c.column for c in layout.sparse)
        if single := [name for name in sparse if columns[f"ids:{name}"].offsets is None]:
            blocks.append(np.stack([_texts(columns[f"ids:{n}"], rows_N, n, fitted) for n in single], axis=1))
        yield from ((ones_N * (each.size // len(rows_N)), each) for each in blocks)
        groups = [name for _, group in sorted(layout.sequences.items()) for name in group.ids]
        for name in [name for name in sparse if name not in single] + groups:
            column = columns[f"ids:{name}"]
            places_V, lengths = column.entries(rows_N, 1 << 31)
            lengths_N = lengths.astype(np.int64)
            yield lengths_N, _texts(column, places_V, name, fitted)
            if column.weights is not None:
                yield lengths_N, column.weights[places_V]


def _texts(column: StoredColumn, places_V: Ints, name: str, fitted: Fitted) -> Ints:
    """The ids of values as if they were texts."""
    ids_V = column.ids(places_V)
    if fitted.kinds.get(name) != "numbers":
        return ids_V
    return np.where(ids_V == MISSING_ID, ids_V, hash_texts(pa.array(ids_V).cast(pa.string())))


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


def rows_of_sides(side_N: Bytes | None, kept_N: NDArray[np.bool_], sides: Sequence[int]) -> dict[int, Ints | None]:
    """The rows of each side that are samples; None = all rows. `side_N`: None = all are on the first of `sides`."""
    if side_N is None:
        return {sides[0]: None if kept_N.all() else np.flatnonzero(kept_N)}
    return {side: np.flatnonzero(kept_N & (side_N == side)) for side in sides}
