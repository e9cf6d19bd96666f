"""The source `arrow`: files of Arrow IPC, also as streams, and Feather files, which are such."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.sources.forms import sized


def schema(path: Path) -> pa.Schema:
    """The columns of a file. Raises DataError, and what pyarrow raises."""
    with _opened(path) as (reader, _):
        return reader.schema


def batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """The batches of a file, and the share of it that is read. Raises as `schema` does."""
    names, size = schema(path).names, max(1, path.stat().st_size)
    with _opened(path, [names.index(name) for name in columns]) as (reader, raw):
        is_file = isinstance(reader, pa.RecordBatchFileReader)
        found = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        # validate returns None, or raises for places outside the buffers: a damaged file would end the process
        yield from sized((batch, min(1.0, raw.tell() / size)) for batch in found if batch.validate(full=True) is None)


@contextlib.contextmanager
def _opened(path: Path, fields: list[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """A reader of the fields with these numbers, and the file that it reads."""
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    with pa.OSFile(str(path)) as raw:
        start = raw.read(6)
        raw.seek(0)
        if start.startswith(b"FEA1"):
            raise DataError(f"{path}: is a Feather file of version 1; write it with version 2, or as Parquet")
        is_file = start == b"ARROW1"
        with pa.ipc.open_file(raw, options=options) if is_file else pa.ipc.open_stream(raw, options=options) as reader:
            yield reader, raw
