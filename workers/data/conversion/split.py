"""Split: on which side a row of the training files is: training, evaluation or test.

A side follows from the values of a row and the seed, so it is the same in any form and order of files. Only
`eval_fraction` goes by file and row instead.

N = rows of a chunk, V = values of a column, T = distinct times
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Bytes, Float64s, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.columnar import DecodedRows
from shardkeep.workers.data.conversion.categories import Kind, decode_ids
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.labels import LabelValues
from shardkeep.workers.data.conversion.layout import ColumnLayout, PriorFit
from shardkeep.workers.data.conversion.reader import RowReader
from shardkeep.workers.data.conversion.rules import FORM, ReadingRules
from shardkeep.workers.data.gather_kernels import fold, part
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.split_config import PLACE, RANDOM, TIME, SplitRecord

SIDES = ("training", "evaluation", "test")
"""By the number of a side."""
TRAIN, EVAL, TEST = range(len(SIDES))
_ROUNDING = 1e-9
"""A tenth of 30 rows is 3, also where the product of floats is a little more."""


@dataclass
class Split:
    """Finds the sides of rows.

    Attributes:
        record: What decides.
        layout: The columns of a sample.
        places: Of each path the name that decides about its rows, by their numbers: of `eval_fraction`.
    """

    record: SplitRecord
    layout: ColumnLayout
    places: Mapping[str, str] = field(default_factory=dict)
    _reader: RowReader | None = None
    _first: int | None = None
    _differs: bool = False

    @classmethod
    def of(
        cls, config: DataConfig, layout: ColumnLayout, seed: int, places: Mapping[str, str] | None = None
    ) -> Split | None:
        """The split that a config describes; None = no row is held out."""
        record = config.held_out(seed)
        return None if record is None else cls(record, layout, places or {})

    @property
    def kept(self) -> SplitRecord | None:
        """What a model keeps; None = nothing: the rows of `eval_fraction` depend on files."""
        return None if self.record.by == PLACE else self.record

    @property
    def columns(self) -> list[str]:
        """The columns that it reads besides those of a sample."""
        return {PLACE: [], RANDOM: [], TIME: [self.layout.time or ""]}.get(self.record.by, [self.record.by])

    @property
    def sides(self) -> list[int]:
        """The sides that get rows."""
        return [TRAIN, *(side for side, share in ((EVAL, self.record.eval), (TEST, self.record.test)) if share)]

    def fit(self, read: Callable[[Sequence[str]], Iterable[Chunk]]) -> None:
        """Finds the borders of a split by time; of another one does nothing. `read`: reads columns of all rows.

        Holds 16 bytes a row meanwhile. Raises DataError for a missing time."""
        if self.record.by != TIME:
            return
        chunks = itertools.chain.from_iterable(chunk.parts() for chunk in read(self.columns))
        time_N = np.concatenate([np.empty(0), *map(self._times, chunks)])
        self._note(time_N.view(np.int64))
        self.record = self.record.model_copy(update={"borders": _borders(time_N, self.record.eval, self.record.test)})

    def sides_of(self, chunk: Chunk, label_N: LabelValues) -> Bytes:
        """The side of each row, uint8 (N,). Raises DataError for what cannot be read."""
        record, side_N = self.record, np.zeros(len(chunk), np.uint8)
        if record.borders is not None:
            time_N = self._times(chunk)
            for side, border in zip((EVAL, TEST), record.borders, strict=True):
                side_N[time_N >= (np.inf if border is None else border)] = side
            return side_N
        name = b"split"
        if record.by == PLACE:
            name, value_N = b"eval_fraction" + os.fsencode(self.places.get(chunk.path, "")), chunk.rows_N - 1
        else:
            value_N = self._row_hashes(chunk, label_N) if record.by == RANDOM else self._ids(chunk)
            self._note(value_N)
        key = np.uint64(xxhash.xxh3_64_intdigest(name, seed=record.seed))
        part(key, value_N, record.eval, record.test, side_N)
        return side_N

    def check(self) -> None:
        """Raises DataError where all rows that it has seen have one value, so that none can be held out."""
        if self._first is not None and not self._differs:
            by, time = self.record.by, self.layout.time
            what = {TIME: f"column {time} has one time", RANDOM: "all columns have one value"}
            raise DataError(
                f"data.split.by: {by}: {what.get(by, 'the column has one value')} in all rows, so none can be held out"
            )

    def _note(self, value_N: Ints) -> None:
        if value_N.size and not self._differs:
            self._first = int(value_N[0]) if self._first is None else self._first
            self._differs = bool((value_N != self._first).any())

    def _times(self, chunk: Chunk) -> Float64s:
        self._reader = self._reader or RowReader(self.layout)
        return self._reader.times(chunk)

    def _ids(self, chunk: Chunk) -> Ints:
        """Hashes of one column's values: those of the number 7 and of the text 7 are equal."""
        column = chunk.column(self.record.by)
        with column.named():
            return decode_ids(column, "texts", ReadingRules(self.layout.missing))

    def _row_hashes(self, chunk: Chunk, label_N: LabelValues) -> Ints:
        """Hashes of all values of a sample, its time excepted."""
        if self._reader is None:
            names = self.layout.categories
            times = {name for name in names if pa.types.is_timestamp(chunk.column(name).values.type)}
            self._reader = _plain_reader(self.layout, times)
        rows = self._reader.rows(chunk, label_N, learn=False)
        return _hashed(rows, self._reader.layout, self._reader.lists)


def _plain_reader(layout: ColumnLayout, times: set[str]) -> RowReader:
    """Reads numbers as they are, and categories as texts, those of `times` excepted: alike in every form of a table."""
    plain, none = {"scale": "none"}, frozenset[str]()
    kinds: dict[str, Kind] = {name: "times" if name in times else "texts" for name in layout.categories}
    dense = tuple(column.model_copy(update=plain) for column in layout.dense)
    groups = {
        name: group.model_copy(update={"numbers": [number.model_copy(update=plain) for number in group.numbers]})
        for name, group in layout.sequences.items()
    }
    layout = replace(layout, dense=dense, sequences=groups, scale="none", form=FORM, time=None)
    return RowReader(layout, prior=PriorFit(FORM, none, none, none, kinds, {}))


def _hashed(rows: DecodedRows, layout: ColumnLayout, lists: frozenset[str]) -> Ints:
    """A hash of each row, int64 (N,), the same in any order of columns."""
    one_N, single = np.ones(len(rows), np.int64), [c.column for c in layout.sparse if c.column not in lists]
    labels = [task.column for task in layout.tasks] or [""]  # own code calls a single label `label`
    columns: list[tuple[str, Ints, NDArray[np.generic]]] = [
        (name, one_N, values_N)
        for names, matrix in (
            (labels, rows.label_N.reshape(len(rows), -1)),
            (layout.schema.dense, rows.dense_NI),
            (single, rows.single_NF),
        )
        for name, values_N in zip(names, matrix.T, strict=True)
    ]
    columns += [] if rows.weight_N is None else [("", one_N, rows.weight_N)]
    for name, entries in rows.lists.items():
        columns.append((name, entries.lengths_N, entries.ids_V))
        columns += [] if entries.weights_V is None else [(name, entries.lengths_N, entries.weights_V)]
    columns += [(name, lengths_N, values_V) for name, (values_V, lengths_N) in rows.numbers.items()]
    hash_N = np.zeros(len(rows), np.uint64)
    for _, lengths_N, values_V in sorted(columns, key=lambda column: column[0]):
        fold(hash_N, lengths_N, _bits(values_V))
    return hash_N.view(np.int64)


def _bits(values_V: NDArray[np.generic]) -> Ints:
    """Values as int64, equal for equal values: of floats the bits, with one zero and one NaN."""
    if values_V.dtype == np.int64:
        return np.ascontiguousarray(values_V, np.int64)
    floats_V = values_V.astype(np.float64) + 0.0
    floats_V[np.isnan(floats_V)] = np.nan
    return floats_V.view(np.int64)


def _borders(time_N: Float64s, held: float, tested: float) -> tuple[float | None, float | None]:
    """The oldest time of evaluation and that of the test; None = it has no rows.

    Each takes whole times, newest first, until it has its share: the rows of a time at a border are on the newer side.
    """
    times_T, count_T = np.unique(time_N, return_counts=True)
    newer_T, taken = np.cumsum(count_T[::-1]), 0  # rows of a time and of newer ones, newest first
    borders: list[float | None] = []
    for share in (tested, held):
        if not share or not len(times_T):
            borders.append(None)
            continue
        place = min(int(np.searchsorted(newer_T, taken + share * len(time_N) - _ROUNDING)), len(times_T) - 1)
        taken = int(newer_T[place])
        borders.append(float(times_T[-1 - place]))
    return borders[1], borders[0]
