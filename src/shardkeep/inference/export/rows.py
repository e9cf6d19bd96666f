"""The rows of one exported table: its two files, writer and reader. Maps the files; nothing is built when they open.

    table-0.index.safetensors   ids int64 (N,), in the order of their placement keys; offsets int64 (2**bits + 1,):
                                ids whose key begins with the bits b are at offsets[b] to offsets[b + 1]; and, of int8
                                only, scales fp32 (N,)
    table-0.rows.safetensors    rows (N, D): fp32, fp16 or int8; a row of int8 is its integers times its scale

Rows keep the format's nearest value: fp16 saturates at its largest finite number; the scale of int8 is the row's
largest absolute value / 127.
"""

# N = rows, D = embedding dim

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardkeep.base.arrays import Floats, Ids, Rows
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import naming
from shardkeep.inference.export.manifest import DTYPES, RowFormat, TableRecord, files_of
from shardkeep.inference.sorted_rows import SortedTable, offsets_of
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.part_files import HEADER_BYTES, ArrayFile

_KINDS = {"I64": np.int64, "F32": np.float32, "F16": np.float16, "I8": np.int8}
_LARGEST16 = np.float32(65504.0)


def write_rows(
    folder: Path, number: int, spec: TableSpec, parts: Iterable[tuple[Ids, Rows]], format: RowFormat
) -> TableRecord:
    """Writes a table. Holds ids and scales in memory, and one part of rows. Raises UserError for values that the format
    does not have, OSError.

    Args:
        parts: Ids (N,) and rows (N, D) of parts of the table, in the order of the ids' placement keys, each id once."""
    index_path, rows_path = files_of(folder, number)
    ids_parts, scales_parts = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    with contextlib.closing(ArrayFile(rows_path)) as rows_file:
        rows_file.extend("rows", np.empty((0, spec.dim), DTYPES[format]))
        for ids_N, rows_ND in parts:
            if format != "fp32" and not np.isfinite(rows_ND).all():
                raise UserError(f"--rows {format}: table {spec.name} has values that are not finite; allowed: fp32")
            stored_ND, scales_N = _stored(rows_ND, format)
            with naming(rows_path):
                rows_file.extend("rows", stored_ND)
            ids_parts.append(ids_N)
            scales_parts.append(scales_N)
        with naming(rows_path):
            rows_file.finish()
    ids_N = np.concatenate(ids_parts)
    offsets = offsets_of(ids_N)
    with contextlib.closing(ArrayFile(index_path)) as index_file, naming(index_path):
        index_file.add("ids", ids_N)
        index_file.add("offsets", offsets)
        if format == "int8":
            index_file.add("scales", np.concatenate(scales_parts))
        index_file.finish()
    return TableRecord(spec, ids_N.size, format, (offsets.size - 1).bit_length() - 1, _hash(offsets))


def _stored(rows_ND: Rows, format: RowFormat) -> tuple[npt.NDArray[Any], Floats]:
    """Rows in the format, and the scales of int8."""
    if format == "fp32":
        return rows_ND, np.empty(0, np.float32)
    if format == "fp16":
        return np.clip(rows_ND, -_LARGEST16, _LARGEST16).astype(np.float16), np.empty(0, np.float32)
    scales_N = (np.abs(rows_ND).max(axis=1, initial=0.0) / np.float32(127.0)).astype(np.float32)
    divisors_N = np.where(scales_N > 0.0, scales_N, np.float32(1.0))
    return np.clip(np.rint(rows_ND / divisors_N[:, None]), -127, 127).astype(np.int8), scales_N


def map_rows(folder: Path, number: int, table: TableRecord) -> SortedTable:
    """Maps the files of a table, and reads headers and offsets. Other processes that map them share the memory.

    Raises CheckpointError where a file is not what the manifest says."""
    of_index, of_rows = table.arrays()
    index_path, rows_path = files_of(folder, number)
    index, rows = _mapped(index_path, of_index), _mapped(rows_path, of_rows)
    offsets = index["offsets"]
    ordered = int(offsets[0]) == 0 and int(offsets[-1]) == table.rows and bool((offsets[1:] >= offsets[:-1]).all())
    if _hash(offsets) != table.offsets or not ordered:
        raise CheckpointError(f"{index_path}: damaged: the offsets have another checksum; export the model again")
    return SortedTable(index["ids"], offsets, rows["rows"], index.get("scales", np.empty(0, np.float32)))


def _mapped(path: Path, arrays: dict[str, tuple[Any, tuple[int, ...]]]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file, which must be these. Raises CheckpointError."""
    expected: dict[str, Any] = {}
    end = 0
    kinds = {dtype: kind for kind, dtype in _KINDS.items()}
    for name, (dtype, shape) in arrays.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        expected[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    try:
        with path.open("rb") as file:
            begin = file.read(HEADER_BYTES)
        size = path.stat().st_size
        if size != HEADER_BYTES + end:
            raise CheckpointError(f"{path}: damaged: {size} bytes, {HEADER_BYTES + end} were written")
        header = json.loads(begin[8:]) if int.from_bytes(begin[:8], "little") == HEADER_BYTES - 8 else None
        if header != expected:
            raise CheckpointError(f"{path}: damaged: its header is wrong; export the model again")
        whole = _map(path, HEADER_BYTES + end, *expected.get("offsets", {"data_offsets": (0, 0)})["data_offsets"])
        data = whole[HEADER_BYTES:]
        return {
            name: data[slice(*expected[name]["data_offsets"])].view(dtype).reshape(shape)
            for name, (dtype, shape) in arrays.items()
        }
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its header is wrong, or it changes"
        raise CheckpointError(f"{path}: cannot be read ({why})") from error


def _map(path: Path, size: int, first: int, end: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file. A page that is touched is read alone: rows lie anywhere, and reading ahead would read 32
    pages for each row. The data from `first` to `end` are read at once."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    if end > first:
        start = (HEADER_BYTES + first) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, start, HEADER_BYTES + end - start)
    return np.frombuffer(mapped, np.uint8)


def _hash(array: npt.NDArray[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
