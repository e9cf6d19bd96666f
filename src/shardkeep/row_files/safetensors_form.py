"""Rows as one safetensors file: the arrays `ids`, int64 (N,), and `rows`, float32 (N, D)."""

# N = rows, D = embedding dim

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError
from shardkeep.row_files.form import CHUNK_ROWS, Chunk, RowFile, RowForm


class _Writer:
    """Both arrays grow at the same time, each from its own place in the file."""

    def __init__(self, paths: Sequence[Path], dim: int, rows: int) -> None:
        (path,) = paths
        ids_end, rows_end = 8 * rows, 8 * rows + 4 * rows * dim
        arrays = {
            "ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, ids_end]},
            "rows": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [ids_end, rows_end]},
        }
        header = json.dumps(arrays, separators=(",", ":")).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._at = [8 + len(header), 8 + len(header) + ids_end]

    def add(self, ids_N: Ids, rows_ND: Rows) -> None:
        for place, array in enumerate((ids_N, rows_ND)):
            self._file.seek(self._at[place])
            self._at[place] += self._file.write(np.ascontiguousarray(array).reshape(-1).data)

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> RowFile:
    try:
        with safe_open(path, framework="np") as file:
            if missing := {"ids", "rows"} - set(file.keys()):
                raise DataError(f"{path}: has no array {min(missing)}; its arrays are {', '.join(sorted(file.keys()))}")
            ids, rows = file.get_slice("ids"), file.get_slice("rows")
            ids_shape, rows_shape = list(ids.get_shape()), list(rows.get_shape())
            kinds = str(ids.get_dtype()), str(rows.get_dtype())
    except SafetensorError as error:
        raise DataError(f"{path}: is no safetensors file ({error})") from error
    if kinds[0] not in ("I64", "I32") or len(ids_shape) != 1:
        raise DataError(f"{path}: ids is {kinds[0]} {ids_shape}; allowed: I64 [N]")
    if kinds[1] != "F32" or len(rows_shape) != 2:
        raise DataError(f"{path}: rows is {kinds[1]} {rows_shape}; allowed: F32 [N, dim]")
    if ids_shape[0] != rows_shape[0]:
        raise DataError(f"{path}: has {rows_shape[0]} rows and {ids_shape[0]} ids")
    count, dim = rows_shape
    return RowFile(path, count, dim, lambda: _chunks(path, count))


def _chunks(path: Path, count: int) -> Iterator[Chunk]:
    try:
        with safe_open(path, framework="np") as file:
            ids: Any = file.get_slice("ids")
            rows: Any = file.get_slice("rows")
            for begin in range(0, count, CHUNK_ROWS):
                end = min(begin + CHUNK_ROWS, count)
                yield ids[begin:end].astype(np.int64), rows[begin:end]
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: damaged ({error})") from error


ENTRY = RowForm("safetensors", ".safetensors", lambda path: [path], _Writer, _open)
