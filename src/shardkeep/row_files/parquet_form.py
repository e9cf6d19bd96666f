"""Rows as Parquet: the columns `id` (int64, or texts to read) and `row` (a list of `dim` float32)."""

# N = rows of a chunk, D = embedding dim

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError
from shardkeep.row_files.form import CHUNK_ROWS, Chunk, RowFile, RowForm
from shardkeep.workers.data.conversion.chunk import plain, shown_text
from shardkeep.workers.data.conversion.hashing import hash_texts
from shardkeep.workers.data.conversion.rules import clean_texts, is_text

MOST_ID = 2**63 - 1


class _Writer:
    def __init__(self, paths: Sequence[Path], dim: int, _rows: int) -> None:
        (path,) = paths
        self._dim = dim
        fields = [pa.field("id", pa.int64(), nullable=False), pa.field("row", _row_type(dim), nullable=False)]
        self._schema = pa.schema(fields)
        self._writer = pq.ParquetWriter(str(path), self._schema, use_dictionary=False)

    def add(self, ids_N: Ids, rows_ND: Rows) -> None:
        values = pa.array(np.ascontiguousarray(rows_ND).reshape(-1))
        rows = pa.FixedSizeListArray.from_arrays(values, type=_row_type(self._dim))
        self._writer.write_batch(pa.record_batch([pa.array(ids_N), rows], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _row_type(dim: int) -> Any:
    return pa.list_(pa.field("element", pa.float32(), nullable=False), dim)


def _open(path: Path) -> RowFile:
    with _damages_named(path), pq.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, int(file.metadata.num_rows)
    for name in ("id", "row"):
        if schema.names.count(name) != 1:
            raise DataError(f"{path}: has no column {name}; its columns are {', '.join(schema.names)}")
    id_type, row_type = plain(schema.empty_table().column("id")).type, schema.field("row").type
    if not (pa.types.is_integer(id_type) or is_text(id_type)):
        raise DataError(f"{path}: id is {id_type}; allowed: int64, or texts")
    listed = pa.types.is_list(row_type) or pa.types.is_large_list(row_type) or pa.types.is_fixed_size_list(row_type)
    if not listed or row_type.value_type != pa.float32():
        raise DataError(f"{path}: row is {row_type}; allowed: lists of float32")
    dim = row_type.list_size if pa.types.is_fixed_size_list(row_type) else _first_length(path)
    text_of = (lambda row: _text(path, row)) if is_text(id_type) else None
    return RowFile(path, rows, dim, lambda: _chunks(path, dim), text_of)


@contextlib.contextmanager
def _damages_named(path: Path) -> Iterator[None]:
    """Raises DataError for what Arrow cannot read, and OSError as it is for what the system cannot."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # Arrow's own OSErrors have no number
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}: damaged, or no Parquet file ({_line(error)})") from error


def _first_length(path: Path) -> int:
    """The length of the first list of a file; 0 without rows."""
    for batch in _batches(path, 1):
        if batch.num_rows:
            return len(batch.column("row")[0].as_py() or ())
    return 0


def _batches(path: Path, rows: int) -> Iterator[Any]:
    with _damages_named(path), pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=rows, columns=["id", "row"])


def _chunks(path: Path, dim: int) -> Iterator[Chunk]:
    done = 0
    for batch in _batches(path, CHUNK_ROWS):
        ids, rows = plain(batch.column("id")), batch.column("row")
        for column, name in ((ids, "id"), (rows, "row")):
            if column.null_count:
                raise DataError(f"{path}, row {done + _first(column.is_null())}: {name} is missing")
        lengths = rows.value_lengths().to_numpy(zero_copy_only=False)
        if lengths.size and (wrong_N := lengths != dim).any():
            row = _first(wrong_N)
            raise DataError(f"{path}, row {done + row}: has {lengths[row - 1]} values, the first row {dim}")
        values = rows.flatten()
        if values.null_count:
            row = done + -(-_first(values.is_null()) // dim)
            raise DataError(f"{path}, row {row}: a value is missing")
        yield _ids(path, ids, done), values.to_numpy().reshape(len(ids), dim)
        done += len(ids)


def _ids(path: Path, ids: Any, done: int) -> Ids:
    if is_text(ids.type):
        return hash_texts(clean_texts(ids))
    if ids.type == pa.uint64() and (large := ids.to_numpy() > MOST_ID).any():
        row = _first(large)
        raise DataError(f"{path}, row {done + row}: id {ids[row - 1]} does not fit int64; allowed: at most {MOST_ID}")
    found: Ids = ids.cast(pa.int64()).to_numpy()
    return found


def _first(marked: Any) -> int:
    """The number of the first marked row of a chunk, from 1."""
    return int(np.flatnonzero(np.asarray(marked))[0]) + 1


def _text(path: Path, row: int) -> str:
    """The text of the id in a row, as one line."""
    with _damages_named(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=["id"]):
            if row <= batch.num_rows:
                return shown_text(clean_texts(plain(batch.column("id"))).cast(pa.binary())[row - 1].as_py())
            row -= batch.num_rows
    raise DataError(f"{path}: damaged: it has fewer rows than before")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


ENTRY = RowForm("parquet", ".parquet", lambda path: [path], _Writer, _open)
