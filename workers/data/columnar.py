"""The columnar form of samples: Arrow IPC in chunks of 65,536 rows, written once, read in place at random.

Knows arrays and bytes; not where samples come from, nor where the bytes lie.
B = rows asked for, C = chunks, F = single-valued features, I = dense columns, N = rows or ids written
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats, Int32s, Ints
from shardkeep.workers.data.batch import Batch, DecodedRows, Ragged
from shardkeep.workers.data.gather_kernels import (
    ALL,
    CHUNK_ROWS,
    gather_dense,
    gather_ids,
    gather_labels,
    gather_lengths,
    gather_lists,
)
from shardkeep.workers.data.samples import Dataset, Ordered
from shardkeep.workers.data.schema import Schema, SequenceColumns

_SCALARS = ("label", "weight", "time")
"""Columns of one number in each row."""
TARGETS = (*_SCALARS, "labels")
"""What a row teaches and counts: columns that may be in a file of their own."""
Stored = Mapping[str, Sequence[str]]
"""What lies side by side in a file, in its order: the columns of `dense` and those of `single`."""


class ColumnarWriter:
    """Writes rows of any number as record batches of exactly 65,536 rows (the last one shorter)."""

    def __init__(self, sink: Any) -> None:
        """`sink`: anything that pyarrow writes to. Holds at most one chunk and what was added last in memory."""
        self._sink = sink
        self._writer: Any = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._hash = xxhash.xxh3_128()

    def add(self, rows: DecodedRows | pa.RecordBatch) -> None:
        """Appends rows; their arrays may be reused by the caller afterwards only after `close`."""
        batch = rows if isinstance(rows, pa.RecordBatch) else record_batch(rows)
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._sink, batch.schema)
        self._waiting.append(batch)
        self._num_waiting += len(batch)
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


def checksum(dataset: ColumnarDataset) -> str:
    """As `ColumnarWriter.checksum` of a file that holds these samples alone. Reads all of them."""
    writer = ColumnarWriter(pa.MockOutputStream())
    for batch in dataset.chunks():
        writer.add(batch)
    writer.close()
    return writer.checksum()


def record_batch(rows: DecodedRows) -> pa.RecordBatch:
    """The columns in which rows are stored."""
    columns: dict[str, pa.Array] = {"label": pa.array(rows.label_N)} if rows.label_N.ndim == 1 else {}
    if rows.weight_N is not None:
        columns["weight"] = pa.array(rows.weight_N)
    if rows.time_N is not None:
        columns["time"] = pa.array(rows.time_N)
    labels: dict[str, NDArray[Any]] = {} if "label" in columns else {"labels": rows.label_N}
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
            places_I, fill_I = np.arange(width), self.fill_I
            gather_dense(flat, start_C, width, places_I, rows_N, fill_I, self.shift_I, self.factor_I, out_NI)
        return out_NI


class ColumnarDataset:
    """Samples in Arrow IPC bytes, memory-mapped or in memory; `gather` copies nothing but the batch itself."""

    def __init__(
        self,
        content: pa.Buffer,
        *,
        schema: Schema,
        lists: frozenset[str],
        transform: DenseTransform,
        stored: Stored | None = None,
        targets: pa.Buffer | None = None,
    ) -> None:
        """`lists`: the multi-valued features. `transform`: of the dense columns, then the numbers of each sequence.
        `stored`: of `content`, None = as `schema`. `targets`: the `TARGETS` of its rows, None = those in it.
        Raises ValueError or ArrowInvalid where the bytes do not fit."""
        self._schema = schema
        ends = np.cumsum([schema.num_dense, *(len(group.numbers) for group in schema.sequences)]).tolist()
        self._transform, *parts = [transform.of(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self._transforms = dict(zip(schema.sequences, parts, strict=True))
        self._single = [f.name for f in schema.features if f.name not in lists]
        self._lists = lists
        own = {"dense": schema.dense, "single": self._single}
        at = {kind: {name: i for i, name in enumerate(names)} for kind, names in (stored or own).items()}
        places = {kind: np.array([at[kind][name] for name in names], np.int64) for kind, names in own.items()}
        self._places = {kind: (len(at[kind]), places_I) for kind, places_I in places.items()}
        batches, self._words = _opened(content)
        beside, words = (batches, self._words) if targets is None else _opened(targets)
        self._contents = content, content if targets is None else targets
        self._num_samples = sum(map(len, batches))
        self._check(batches, beside)
        self._starts = _starts(batches, self._words, schema.sequences)
        if targets is not None:
            kept = {name: at for name, at in self._starts.items() if name not in TARGETS}
            self._starts = kept | _starts(beside, words, ())
        self._halves = self._words.view(np.int32)
        self._targets = words.view(np.uint8 if pa.uint8() in beside[0].schema.types else np.float32)

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
        weight_B = (
            self._gather_scalars("weight", self._targets.view(np.float32), rows_B) if "weight" in self._starts else None
        )
        single = self._gather_single(rows_B)
        ids = {
            f.name: self._gather_list(f.name, rows_B) if f.name in self._lists else single[f.name]
            for f in self._schema.features
        }
        numbers: dict[str, Floats] = {}
        for group in self._schema.sequences:
            self._gather_sequence(group, rows_B, ids, numbers)
        dense_BI = np.empty((len(rows_B), self._schema.num_dense), np.float32)
        if self._schema.num_dense:
            stored, t = (self._words.view(np.float32), self._starts["dense"], *self._places["dense"]), self._transform
            gather_dense(*stored, rows_B, t.fill_I, t.shift_I, t.factor_I, dense_BI)

        def whole() -> dict[str, Ragged]:
            found = dict[str, Ragged]()
            for group in self._schema.sequences:
                self._gather_sequence(replace(group, numbers=(), max_length=ALL), rows_B, found, {})
            return found

        return Batch(dense_BI, ids, label_BT, weight_B, numbers, whole)

    def times(self) -> Float64s:
        """The time of each sample, float64 (len,), a fresh array. Raises KeyError where none was written."""
        floats = self._targets.view(np.float64)
        return np.concatenate([floats[at : at + n] for at, n in _chunks(self._starts["time"], self._num_samples)])

    def chunks(self) -> Iterator[pa.RecordBatch]:
        """The samples as a file of these columns alone holds them."""
        lists = [f"{kind}:{feature.name}" for feature in self._schema.features for kind in ("ids", "weights")]
        lists += [f"ids:{column.name}" for group in self._schema.sequences for column in group.ids]
        lists += [f"numbers:{name}" for group in self._schema.sequences for name in group.numbers]
        for batch, beside in zip(*(_opened(content)[0] for content in self._contents), strict=True):
            columns = {name: beside[name] for name in beside.schema.names if name in TARGETS}
            for kind, (width, place_I) in self._places.items():
                if len(place_I):
                    matrix = np.asarray(batch[kind].flatten()).reshape(-1, width)[:, place_I]
                    columns[kind] = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), len(place_I))
            yield pa.record_batch(columns | {name: batch[name] for name in lists if name in batch.schema.names})

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
            return self._gather_scalars("label", self._targets, rows_B)[:, None]
        num_labels = len(self._schema.labels)
        nan_T, zero_T, one_T = (np.full(num_labels, value, np.float32) for value in (np.nan, 0.0, 1.0))
        label_BT, place_T = np.empty((len(rows_B), num_labels), np.float32), np.arange(num_labels)
        stored = self._targets.view(np.float32), self._starts["labels"], num_labels, place_T
        gather_dense(*stored, rows_B, nan_T, zero_T, one_T, label_BT)
        return label_BT

    def _gather_scalars(self, name: str, values: NDArray[Any], rows_B: Ints) -> Floats:
        out_B = np.empty(len(rows_B), np.float32)
        gather_labels(values, self._starts[name], rows_B, out_B)
        return out_B

    def _gather_single(self, rows_B: Ints) -> dict[str, Ragged]:
        ids_FB = np.empty((len(self._single), len(rows_B)), np.int64)
        if self._single:
            gather_ids(self._words, self._starts["single"], *self._places["single"], rows_B, ids_FB)
        return {name: Ragged(ids_FB[f]) for f, name in enumerate(self._single)}

    def _gather_list(self, name: str, rows_B: Ints) -> Ragged:
        lengths_B, total = self._gather_lengths(name, rows_B, ALL)
        values_N = self._gather_entries(f"ids:{name}", rows_B, ALL, total)
        weights_N: Floats | None = None
        if f"weights:{name}" in self._starts:
            weights_N = self._gather_entries(f"weights:{name}", rows_B, ALL, total)
        return Ragged(values_N, lengths_B, weights_N)

    def _gather_sequence(
        self, group: SequenceColumns, rows_B: Ints, ids: dict[str, Ragged], numbers: dict[str, Floats]
    ) -> None:
        """Adds the newest entries of the rows, oldest first, to the ids and numbers of a batch."""
        lengths_B, total = self._gather_lengths(group.ids[0].name, rows_B, group.max_length)
        kept = group.max_length if group.newest == "last" else -group.max_length
        for column in group.ids:
            values_N = self._gather_entries(f"ids:{column.name}", rows_B, kept, total)
            ids[column.name] = Ragged(values_N, lengths_B)
        if group.numbers:
            stored = [self._gather_entries(f"numbers:{name}", rows_B, kept, total) for name in group.numbers]
            numbers[group.name] = self._transforms[group].inputs(np.stack(stored, axis=1))

    def _gather_lengths(self, name: str, rows_B: Ints, most: int) -> tuple[Int32s, int]:
        """Entries of each row, and of all."""
        lengths_B = np.empty(len(rows_B), np.int32)
        return lengths_B, gather_lengths(self._halves, self._starts[f"ids:{name}"], rows_B, most, lengths_B)

    def _gather_entries(self, name: str, rows_B: Ints, kept: int, total: int) -> NDArray[Any]:
        values: NDArray[Any] = self._words if name.startswith("ids:") else self._words.view(np.float32)
        out_N = np.empty(total, values.dtype)
        starts, value_starts = self._starts[name], self._starts[f"{name}.values"]
        gather_lists(self._halves, starts, values, value_starts, rows_B, kept, out_N)
        return out_N

    def _check(self, batches: list[pa.RecordBatch], beside: list[pa.RecordBatch]) -> None:
        fields = [field for field in batches[0].schema if field.name not in TARGETS]
        fields += [field for field in beside[0].schema if field.name in TARGETS]
        types = {field.name: field.type for field in fields}
        expected = {"label": pa.float32() if types.get("label") == pa.float32() else pa.uint8()}
        if self._schema.tasks:
            expected = {"labels": pa.list_(pa.float32(), len(self._schema.labels))}
        optional = {"weight": pa.float32(), "time": pa.float64()}
        optional |= {f"weights:{name}": pa.list_(pa.float32()) for name in self._lists}
        expected |= {name: kind for name, kind in optional.items() if name in types}
        for kind, (width, place_I) in self._places.items():
            if len(place_I):
                expected[kind] = pa.list_(pa.float32() if kind == "dense" else pa.int64(), width)
        groups = self._schema.sequences
        id_lists = [*self._lists, *(column.name for group in groups for column in group.ids)]
        expected |= {f"ids:{name}": pa.list_(pa.int64()) for name in id_lists}
        expected |= {f"numbers:{name}": pa.list_(pa.float32()) for group in groups for name in group.numbers}
        if types | expected != types or len(types) != len(fields):
            raise ValueError("the columns are not those of the config")
        if [len(batch) for batch in batches] != [len(batch) for batch in beside]:
            raise ValueError("the labels are not those of the same rows")


def _chunks(start_C: Ints, num_samples: int) -> Iterator[tuple[int, int]]:
    """Where a column of each chunk begins, and the chunk's rows."""
    for chunk, start in enumerate(start_C.tolist()):
        yield start, min(CHUNK_ROWS, num_samples - chunk * CHUNK_ROWS)


def by_time(dataset: ColumnarDataset) -> Dataset:
    """The samples in the order of their times; those of one time stay in their order.

    Holds 8 bytes a sample, unless they are in order already."""
    time_N = dataset.times()
    if (time_N[1:] >= time_N[:-1]).all():
        return dataset
    return Ordered(dataset, np.argsort(time_N, kind="stable").astype(np.int64))


def _opened(content: pa.Buffer) -> tuple[list[pa.RecordBatch], Ints]:
    """The chunks of a file, and all of it as words. Raises ValueError for chunks of another size."""
    reader = pa.ipc.open_file(content)
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    if any(len(batch) != CHUNK_ROWS for batch in batches[:-1]) or not batches:
        raise ValueError("the record batches are not of 65,536 rows")
    return batches, np.frombuffer(content, np.int64, content.size // 8)


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
