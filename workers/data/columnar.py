"""The columnar form of samples: Arrow IPC in chunks of 65,536 rows, written once, read in place at random.

Knows arrays and bytes; not where samples come from, nor where the bytes lie.
B = rows asked for, C = chunks, F = single-valued features, I = dense columns, N = rows or ids written
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats, Int32s, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.gather_kernels import (
    ALL,
    CHUNK_ROWS,
    gather_dense,
    gather_ids,
    gather_labels,
    gather_lengths,
    gather_lists,
)
from shardkeep.workers.data.samples import Dataset
from shardkeep.workers.data.schema import Schema, SequenceColumns

_SCALARS = ("label", "weight", "time")
"""Columns of one number in each row."""


@dataclass(frozen=True)
class Lists:
    """A multi-valued feature or a column of a sequence, N rows: ids, how many each row has, and maybe their weights."""

    ids_V: Ints
    lengths_N: Ints
    weights_V: Floats | None = None


@dataclass(frozen=True)
class DecodedRows:
    """Decoded rows. dense_NI: float32, nan = missing; single_NF: int64, row-major; label_N: uint8 or float32, of
    several labels float32 (N, T), nan = the row has no such label; weight_N: float32, None = all 1; time_N: float64,
    None = no order but the rows' own; numbers: of each column of numbers beside the ids of a sequence, float32 (V,),
    nan = missing, and how many each row has."""

    label_N: NDArray[np.uint8] | NDArray[np.float32]
    dense_NI: Floats
    single_NF: Ints
    lists: Mapping[str, Lists]
    weight_N: Floats | None = None
    time_N: Float64s | None = None
    numbers: Mapping[str, tuple[Floats, Ints]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label_N)


class ColumnarWriter:
    """Writes rows of any number as record batches of exactly 65,536 rows (the last one shorter)."""

    def __init__(self, sink: Any) -> None:
        """`sink`: anything that pyarrow writes to. Holds at most one chunk and what was added last in memory."""
        self._sink = sink
        self._writer: Any = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._hash = xxhash.xxh3_128()

    def add(self, rows: DecodedRows) -> None:
        """Appends rows; their arrays may be reused by the caller afterwards only after `close`."""
        batch = record_batch(rows)
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._sink, batch.schema)
        self._waiting.append(batch)
        self._num_waiting += len(rows)
        if self._num_waiting >= CHUNK_ROWS:
            self._flush(self._num_waiting - self._num_waiting % CHUNK_ROWS)

    def close(self) -> None:
        """Writes what is left and Arrow's footer; the sink stays open."""
        if self._num_waiting:
            self._flush(self._num_waiting)
        if self._writer is not None:
            self._writer.close()

    def checksum(self) -> str:
        """xxh3 of all values and list lengths written so far, 128 bits, as hex; the same for every form of the file."""
        return self._hash.hexdigest()

    def _flush(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._waiting)
        for start in range(0, num_rows, CHUNK_ROWS):
            part = table.slice(start, min(CHUNK_ROWS, num_rows - start)).combine_chunks()
            batch = part.to_batches()[0]
            self._writer.write_batch(batch)
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                self._hash.update(f"{name} {len(column)};".encode())
                if pa.types.is_list(column.type):
                    self._hash.update(np.asarray(column.value_lengths()).data)
                self._hash.update(np.asarray(column if name in _SCALARS else column.flatten()).data)
        rest = table.slice(num_rows)
        self._waiting = rest.combine_chunks().to_batches() if len(rest) else []
        self._num_waiting = len(rest)


def record_batch(rows: DecodedRows) -> pa.RecordBatch:
    """The columns in which rows are stored."""
    columns: dict[str, pa.Array] = {"label": pa.array(rows.label_N)} if rows.label_N.ndim == 1 else {}
    if rows.weight_N is not None:
        columns["weight"] = pa.array(rows.weight_N)
    if rows.time_N is not None:
        columns["time"] = pa.array(rows.time_N)
    labels: dict[str, NDArray[Any]] = {} if columns else {"labels": rows.label_N}
    for name, matrix in (labels | {"dense": rows.dense_NI, "single": rows.single_NF}).items():
        if matrix.shape[1]:
            flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
    for name, column in rows.lists.items():
        columns[f"ids:{name}"] = _list_array(column.ids_V, column.lengths_N)
        if column.weights_V is not None:
            columns[f"weights:{name}"] = _list_array(column.weights_V, column.lengths_N)
    columns |= {f"numbers:{name}": _list_array(*numbers) for name, numbers in rows.numbers.items()}
    return pa.record_batch(columns)


def _list_array(values_V: Ints | Floats, lengths_N: Ints) -> pa.ListArray:
    offsets = np.zeros(len(lengths_N) + 1, np.int32)
    np.cumsum(lengths_N, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_V))


@dataclass(frozen=True)
class DenseTransform:
    """What turns stored numbers into inputs, per column: (x - shift) * factor, or fill where missing."""

    fill_I: Floats
    shift_I: Floats
    factor_I: Floats

    def of(self, start: int, stop: int) -> DenseTransform:
        """That of columns [start, stop)."""
        return DenseTransform(*(part_I[start:stop] for part_I in (self.fill_I, self.shift_I, self.factor_I)))

    def inputs(self, stored_NI: Floats) -> Floats:
        """Inputs float32 (N, I) of stored numbers, C-contiguous."""
        num_rows, width = stored_NI.shape
        out_NI = np.empty((num_rows, width), np.float32)
        if width:
            start_C = np.arange(0, max(num_rows, 1), CHUNK_ROWS, dtype=np.int64) * width
            rows_N = np.arange(num_rows, dtype=np.int64)
            flat = stored_NI.reshape(-1)
            gather_dense(flat, start_C, rows_N, self.fill_I, self.shift_I, self.factor_I, out_NI)
        return out_NI


class ColumnarDataset:
    """Samples in Arrow IPC bytes, memory-mapped or in memory; `gather` copies nothing but the batch itself."""

    def __init__(self, content: pa.Buffer, *, schema: Schema, lists: frozenset[str], transform: DenseTransform) -> None:
        """`lists`: the multi-valued features. `transform`: of the dense columns, then the numbers of each sequence.
        Raises ValueError or ArrowInvalid where `content` does not fit."""
        self._schema = schema
        ends = np.cumsum([schema.num_dense, *(len(group.numbers) for group in schema.sequences)]).tolist()
        self._transform, *parts = [transform.of(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self._transforms = dict(zip(schema.sequences, parts, strict=True))
        self._single = [f.name for f in schema.features if f.name not in lists]
        self._lists = lists
        reader = pa.ipc.open_file(content)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        if any(len(batch) != CHUNK_ROWS for batch in batches[:-1]) or not batches:
            raise ValueError("the record batches are not of 65,536 rows")
        self._num_samples = sum(len(batch) for batch in batches)
        words = np.frombuffer(content, np.int64, content.size // 8)
        self._words = words
        self._halves = words.view(np.int32)
        self._floats = words.view(np.float32)
        types = {field.name: field.type for field in batches[0].schema}
        self._labels = self._floats if types.get("label") == pa.float32() else words.view(np.uint8)
        self._check(batches[0])
        self._starts = _starts(batches, words, schema.sequences)

    @property
    def schema(self) -> Schema:
        return self._schema

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, rows_B: Ints) -> Batch:
        rows_B = np.ascontiguousarray(rows_B, np.int64)
        if len(rows_B) and not 0 <= rows_B.min() <= rows_B.max() < self._num_samples:
            raise IndexError(f"a row is outside [0, {self._num_samples})")
        label_BT = self._gather_labels(rows_B)
        weight_B = self._gather_scalars("weight", self._floats, rows_B) if "weight" in self._starts else None
        single = self._gather_single(rows_B)
        ids = {
            f.name: self._gather_list(f.name, rows_B) if f.name in self._lists else single[f.name]
            for f in self._schema.features
        }
        numbers: dict[str, Floats] = {}
        for group in self._schema.sequences:
            self._gather_sequence(group, rows_B, ids, numbers)
        return Batch(self._gather_dense(rows_B), ids, label_BT, weight_B, numbers)

    def times(self) -> Float64s:
        """The time of each sample, float64 (len,), a fresh array. Raises KeyError where none was written."""
        floats = self._words.view(np.float64)
        return np.concatenate([floats[at : at + n] for at, n in _chunks(self._starts["time"], self._num_samples)])

    def histories(self) -> str:
        """How many of its sequences are cut and empty, in words behind those that say where the samples come from."""
        told = ""
        for group in self._schema.sequences:
            counts = np.zeros(2, np.int64)
            for at, count in _chunks(self._starts[f"ids:{group.ids[0].name}"], self._num_samples):
                lengths_N = np.diff(self._halves[at : at + count + 1])
                counts += (lengths_N > group.max_length).sum(), (lengths_N == 0).sum()
            cut, empty = counts / self._num_samples
            told += f"; {group.name}: {cut:.1%} of the histories are cut to {group.max_length}, {empty:.1%} are empty"
        return told

    def _gather_labels(self, rows_B: Ints) -> Floats:
        if not self._schema.tasks:
            return self._gather_scalars("label", self._labels, rows_B)[:, None]
        num_labels = len(self._schema.labels)
        nan_T, zero_T, one_T = (np.full(num_labels, value, np.float32) for value in (np.nan, 0.0, 1.0))
        label_BT = np.empty((len(rows_B), num_labels), np.float32)
        gather_dense(self._floats, self._starts["labels"], rows_B, nan_T, zero_T, one_T, label_BT)
        return label_BT

    def _gather_scalars(self, name: str, values: NDArray[Any], rows_B: Ints) -> Floats:
        out_B = np.empty(len(rows_B), np.float32)
        gather_labels(values, self._starts[name], rows_B, out_B)
        return out_B

    def _gather_dense(self, rows_B: Ints) -> Floats:
        dense_BI = np.empty((len(rows_B), self._schema.num_dense), np.float32)
        if self._schema.num_dense:
            t = self._transform
            gather_dense(self._floats, self._starts["dense"], rows_B, t.fill_I, t.shift_I, t.factor_I, dense_BI)
        return dense_BI

    def _gather_single(self, rows_B: Ints) -> dict[str, Ragged]:
        ids_FB = np.empty((len(self._single), len(rows_B)), np.int64)
        if self._single:
            gather_ids(self._words, self._starts["single"], rows_B, ids_FB)
        return {name: Ragged(ids_FB[f]) for f, name in enumerate(self._single)}

    def _gather_list(self, name: str, rows_B: Ints) -> Ragged:
        lengths_B, total = self._gather_lengths(name, rows_B, ALL)
        values_N = self._gather_entries(f"ids:{name}", self._words, rows_B, ALL, total)
        weights_N: Floats | None = None
        if f"weights:{name}" in self._starts:
            weights_N = self._gather_entries(f"weights:{name}", self._floats, rows_B, ALL, total)
        return Ragged(values_N, lengths_B, weights_N)

    def _gather_sequence(
        self, group: SequenceColumns, rows_B: Ints, ids: dict[str, Ragged], numbers: dict[str, Floats]
    ) -> None:
        """Adds the newest entries of the rows, oldest first, to the ids and numbers of a batch."""
        lengths_B, total = self._gather_lengths(group.ids[0].name, rows_B, group.max_length)
        kept = group.max_length if group.newest == "last" else -group.max_length
        for column in group.ids:
            values_N = self._gather_entries(f"ids:{column.name}", self._words, rows_B, kept, total)
            ids[column.name] = Ragged(values_N, lengths_B)
        if group.numbers:
            stored = [
                self._gather_entries(f"numbers:{name}", self._floats, rows_B, kept, total) for name in group.numbers
            ]
            numbers[group.name] = self._transforms[group].inputs(np.stack(stored, axis=1))

    def _gather_lengths(self, name: str, rows_B: Ints, most: int) -> tuple[Int32s, int]:
        """Entries of each row, and of all."""
        lengths_B = np.empty(len(rows_B), np.int32)
        return lengths_B, gather_lengths(self._halves, self._starts[f"ids:{name}"], rows_B, most, lengths_B)

    def _gather_entries(self, name: str, values: NDArray[Any], rows_B: Ints, kept: int, total: int) -> NDArray[Any]:
        out_N = np.empty(total, values.dtype)
        starts, value_starts = self._starts[name], self._starts[f"{name}.values"]
        gather_lists(self._halves, starts, values, value_starts, rows_B, kept, out_N)
        return out_N

    def _check(self, batch: pa.RecordBatch) -> None:
        expected = {"label": pa.float32() if self._labels is self._floats else pa.uint8()}
        if self._schema.tasks:
            expected = {"labels": pa.list_(pa.float32(), len(self._schema.labels))}
        optional = {"weight": pa.float32(), "time": pa.float64()}
        optional |= {f"weights:{name}": pa.list_(pa.float32()) for name in self._lists}
        expected |= {name: kind for name, kind in optional.items() if name in batch.schema.names}
        if self._schema.num_dense:
            expected["dense"] = pa.list_(pa.float32(), self._schema.num_dense)
        if self._single:
            expected["single"] = pa.list_(pa.int64(), len(self._single))
        groups = self._schema.sequences
        id_lists = [*self._lists, *(column.name for group in groups for column in group.ids)]
        expected |= {f"ids:{name}": pa.list_(pa.int64()) for name in id_lists}
        expected |= {f"numbers:{name}": pa.list_(pa.float32()) for group in groups for name in group.numbers}
        columns = {field.name: field.type for field in batch.schema}
        if columns != expected or len(batch.schema) != len(columns):
            raise ValueError("the columns are not those of the config")


def _chunks(start_C: Ints, num_samples: int) -> Iterator[tuple[int, int]]:
    """Where a column of each chunk begins, and the chunk's rows."""
    for chunk, start in enumerate(start_C.tolist()):
        yield start, min(CHUNK_ROWS, num_samples - chunk * CHUNK_ROWS)


class Ordered:
    """The samples of a data set in another order. order_N: int64, which of its samples comes when."""

    def __init__(self, dataset: Dataset, order_N: Ints) -> None:
        self._dataset = dataset
        self._order_N = order_N

    @property
    def schema(self) -> Schema:
        return self._dataset.schema

    def __len__(self) -> int:
        return len(self._order_N)

    def gather(self, rows_B: NDArray[np.int64]) -> Batch:
        return self._dataset.gather(self._order_N[rows_B])


def by_time(dataset: ColumnarDataset) -> Dataset:
    """The samples in the order of their times; those of one time stay in their order.

    Holds 8 bytes a sample, unless they are in order already."""
    time_N = dataset.times()
    if (time_N[1:] >= time_N[:-1]).all():
        return dataset
    return Ordered(dataset, np.argsort(time_N, kind="stable").astype(np.int64))


def _starts(batches: list[pa.RecordBatch], words: Ints, groups: Sequence[SequenceColumns]) -> dict[str, Ints]:
    """Where each column of each chunk begins in the content, counted in the column's own elements.

    Raises ValueError where the kernels, which check nothing, would read outside of the content.
    """
    first = {name: g.ids[0].name for g in groups for name in (*(column.name for column in g.ids), *g.numbers)}
    starts: dict[str, list[int]] = {}
    for batch in batches:
        lists: dict[str, NDArray[np.int32]] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if pa.types.is_list(column.type):
                offsets_N, at = _elements(column.buffers()[1], np.dtype(np.int32), len(batch) + 1, words)
                starts.setdefault(name, []).append(at)
                if offsets_N[0] < 0 or (offsets_N[1:] < offsets_N[:-1]).any():
                    raise ValueError(f"column {name}: the offsets of its lists go back")
                own = name.partition(":")[2]
                if not np.array_equal(lists.setdefault(first.get(own, own), offsets_N), offsets_N):
                    raise ValueError(f"column {name}: has other lists than its ids")
                width, count, name = column.type.value_type.bit_width // 8, int(offsets_N[-1]), f"{name}.values"
            elif name in _SCALARS:
                width, count = column.type.bit_width // 8, len(batch)
            else:
                width, count = column.type.value_type.bit_width // 8, len(batch) * column.type.list_size
            starts.setdefault(name, []).append(_elements(column.buffers()[-1], _DTYPES[width], count, words)[1])
    return {name: np.array(at, np.int64) for name, at in starts.items()}


_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 4: np.dtype(np.float32), 8: np.dtype(np.int64)}


def _elements(buffer: pa.Buffer | None, dtype: np.dtype[Any], count: int, words: Ints) -> tuple[NDArray[Any], int]:
    """The first `count` elements of a buffer, and where they begin in the content, counted in elements.

    Raises ValueError where they are not all in the content, or not aligned.
    """
    if not count and dtype != np.int32:  # no list holds anything: nothing will be read
        return np.empty(0, dtype), 0
    first, beyond = divmod(0 if buffer is None else buffer.address - words.ctypes.data, dtype.itemsize)
    if buffer is None or buffer.size < count * dtype.itemsize or beyond:
        raise ValueError("a column is shorter than its rows, or not aligned")
    if first < 0 or (first + count) * dtype.itemsize > words.nbytes:
        raise ValueError("a column lies outside of the file")
    return words.view(dtype)[first : first + count], first
