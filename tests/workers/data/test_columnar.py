"""Columnar bytes that do not fit are refused when they are opened: the kernels that read them check nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.workers.data.batch import DecodedRows, Lists
from shardkeep.workers.data.columnar import ColumnarDataset, ColumnarWriter, DenseTransform
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from tests.support.cases import every

COUNT = 70_000
SEEN = SequenceColumns("seen", (Feature("s", "c", "none"), Feature("t", "m", "none")), ("n",), 2)
FEATURES = Feature("c", "c"), Feature("m", "m"), Feature("w", "w", "weighted")
SCHEMA = Schema(("x", "z"), FEATURES, sequences=(SEEN,))
NONE = np.zeros(3, np.float32)
TRANSFORM = DenseTransform(NONE, NONE, np.ones(3, np.float32))


@functools.cache
def _content() -> tuple[pa.Buffer, DecodedRows]:
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(0, 4, COUNT)
    total = int(lengths_N.sum())
    lists = {
        "m": Lists(rng.integers(0, 9, total), lengths_N),
        "w": Lists(rng.integers(0, 9, total), lengths_N, rng.random(total).astype(np.float32)),
        "s": Lists(rng.integers(0, 9, total), lengths_N),
        "t": Lists(rng.integers(0, 9, total), lengths_N),
    }
    numbers = {"n": (rng.random(total).astype(np.float32), lengths_N)}
    dense_NI = rng.normal(size=(COUNT, 2)).astype(np.float32)
    label_N, single_NF = rng.integers(0, 2, COUNT).astype(np.uint8), rng.integers(0, 9, (COUNT, 1))
    rows = DecodedRows(label_N, dense_NI, single_NF, lists, numbers=numbers)
    sink = pa.BufferOutputStream()
    writer = ColumnarWriter(sink)
    writer.add(rows)
    writer.close()
    return sink.getvalue(), rows


def _rewritten(change: Callable[[int, pa.RecordBatch], pa.RecordBatch], **options: object) -> pa.Buffer:
    reader = pa.ipc.open_file(_content()[0])
    batches = [change(i, reader.get_batch(i)) for i in range(reader.num_record_batches)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def _open(content: pa.Buffer) -> ColumnarDataset:
    return ColumnarDataset(content, schema=SCHEMA, lists=frozenset(["m", "w"]), transform=TRANSFORM)


def _with_offsets(name: str, offsets: Callable[[np.ndarray], None]) -> pa.Buffer:
    """The content with the offsets of the second chunk's column changed in place."""
    content, _ = _content()
    writable = bytearray(content)
    batch = pa.ipc.open_file(content).get_batch(1)
    buffer = batch.column(batch.schema.get_field_index(name)).buffers()[1]
    start = buffer.address - content.address
    offsets(np.frombuffer(writable, np.int32, len(batch) + 1, start))
    return pa.py_buffer(bytes(writable))


@every("name", ["ids:m", "ids:w", "weights:w", "ids:s", "ids:t", "numbers:n"])
@every(
    "damage",
    [
        lambda offsets: np.subtract(offsets, 2_000_000_000, out=offsets),
        lambda offsets: np.put(offsets, 10, offsets[12] + 1),
        lambda offsets: np.put(offsets, -1, 2_000_000_000),
    ],
    ids=["negative", "backwards", "beyond"],
)
def test_offsets_that_lead_out_of_the_content_are_refused(name: str, damage: Callable[[np.ndarray], None]) -> None:
    with pytest.raises(ValueError, match="column"):
        _open(_with_offsets(name, damage))


@every("name", ["weights:w", "ids:t", "numbers:n"])
def test_lists_of_other_lengths_than_the_ids_beside_them_are_refused(name: str) -> None:
    def move(offsets: np.ndarray) -> None:
        where = int(np.flatnonzero(np.diff(offsets) > 0)[3])
        offsets[where + 1 :] -= 1

    with pytest.raises(ValueError, match=f"{name}: has other lists than its ids"):
        _open(_with_offsets(name, move))


def _cast(name: str, kind: pa.DataType) -> Callable[[int, pa.RecordBatch], pa.RecordBatch]:
    def change(_index: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index(name)
        return batch.set_column(at, name, batch.column(at).cast(kind))

    return change


def _with_label_twice(_index: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*batch.columns, batch.column(0)], names=[*batch.schema.names, "label"])


@every(
    "content_of",
    [
        lambda: _rewritten(_cast("label", pa.int64())),
        lambda: _rewritten(_cast("ids:m", pa.list_(pa.int16()))),
        lambda: _rewritten(_cast("weights:w", pa.list_(pa.float64()))),
        lambda: _rewritten(_cast("numbers:n", pa.list_(pa.float64()))),
        lambda: _rewritten(_cast("dense", pa.list_(pa.float64(), 2))),
        lambda: _rewritten(lambda index, batch: batch.slice(0, 10) if index == 0 else batch),
        lambda: _rewritten(_with_label_twice),
        lambda: _rewritten(lambda _, batch: batch.drop_columns(["single"])),
        lambda: _rewritten(lambda _, batch: batch, compression="zstd"),
        lambda: pa.py_buffer(b""),
        lambda: pa.py_buffer(bytes(_content()[0])[:-200]),
        lambda: pa.py_buffer(bytes(1000)),
    ],
)
def test_content_of_another_form_is_refused(content_of: Callable[[], pa.Buffer]) -> None:
    content = content_of()
    with pytest.raises(ValueError):
        _open(content)
