"""The source `jsonl`: JSON lines, plain or compressed, an object per row, read in blocks. Texts of times stay texts."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.json as pj  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, first_line
from shardkeep.workers.data.conversion.rules import is_list
from shardkeep.workers.data.sources import text_files

_PLACE = re.compile(r"JSON parse error: (?:Column\(/?(.*?)\) )?(.*) in row (\d+)")


def schema(path: Path) -> pa.Schema:
    """The columns of all rows. Reads the whole file once. Raises DataError."""
    status = path.stat()
    return _schema(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(64)
def _schema(path: Path, _size: int, _time: int) -> pa.Schema:
    found, done, large = pa.schema([]), 0, set[str]()
    for block, _ in _blocks(path):
        table = _parsed(path, block, done)
        own = _typed(table, block)
        large |= {field.name for field in own if field.type == pa.uint64()}
        try:
            found = pa.unify_schemas([found, own], promote_options="permissive")  # of int64 and uint64: int64
        except pa.ArrowException as error:
            _parsed(path, block, done, explicit_schema=found, unexpected_field_behavior="ignore")  # names the row
            raise DataError(f"{path}, after row {done}: holds values of two types ({first_line(error)})") from error
        done += len(table)
    kinds = ((f.name, pa.uint64() if f.name in large and pa.types.is_integer(f.type) else f.type) for f in found)
    return pa.schema(list(kinds))


def batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """The rows block by block, and the share of the file that is read. Raises DataError."""
    whole, done = schema(path), 0
    wanted = pa.schema([whole.field(name) for name in columns])
    for block, share in _blocks(path):
        table = _parsed(path, block, done, explicit_schema=wanted, unexpected_field_behavior="ignore")
        done += len(table)
        yield from ((batch, share) for batch in table.combine_chunks().to_batches())


def _blocks(path: Path) -> Iterator[tuple[bytes, float]]:
    """Whole lines of the file, and the share of it that is read."""
    start, size = text_files.first_bytes(path, "jsonl"), path.stat().st_size
    if start.lstrip()[:1] == b"[":
        raise DataError(f"{path}: is one JSON array; write one object per line (jq -c '.[]')")
    cut = b""
    try:
        with path.open("rb") as raw:
            stream = pa.input_stream(raw, compression=text_files.compression_of(path))
            while fresh := bytes(stream.read(text_files.BLOCK_BYTES)):
                lines, end, cut = (cut + fresh).rpartition(b"\n")
                if lines.strip():
                    yield lines + end, min(1.0, raw.tell() / max(1, size))
            if cut.strip():
                yield cut, 1.0
    except OSError as error:
        raise DataError(f"{path}: {text_files.reason(error)}") from error


def _parsed(path: Path, block: bytes, done: int, **options: Any) -> pa.Table:
    """The rows of a block, which has `done` rows before it."""
    reading = pj.ReadOptions(use_threads=False, block_size=max(len(block), 1 << 10))
    try:
        return pj.read_json(pa.BufferReader(block), reading, pj.ParseOptions(newlines_in_values=False, **options))
    except pa.ArrowInvalid as error:
        if not (place := _PLACE.fullmatch(first_line(error))):
            raise DataError(f"{path}, after row {done}: cannot be read as JSON lines ({first_line(error)})") from error
        column, what, row = place.groups()
        at = f"{path}, row {done + int(row) + 1}" + (f", column {column}" if column else "")
        raise DataError(f"{at}: {what}; allowed: one object per line, values of one type in a column") from error


def _typed(table: pa.Table, block: bytes) -> pa.Schema:
    """The types of a block's columns. JSON has no times, and pyarrow reads whole numbers beyond int64 as floats."""
    kinds = {field.name: _texts(field.type) for field in table.schema}
    for name in (name for name, kind in kinds.items() if pa.types.is_floating(kind)):
        number_N = table[name].drop_null().to_numpy()
        if len(number_N) and (number_N == np.floor(number_N)).all() and (number_N >= 2.0**53).any():  # lost digits
            with contextlib.suppress(DataError):
                large = pa.schema([(name, pa.uint64())])
                _parsed(Path(), block, 0, explicit_schema=large, unexpected_field_behavior="ignore")
                kinds[name] = pa.uint64()
    return pa.schema(list(kinds.items()))


def _texts(kind: pa.DataType) -> pa.DataType:
    if is_list(kind):
        return pa.list_(_texts(kind.value_type))
    return pa.string() if pa.types.is_timestamp(kind) else kind
