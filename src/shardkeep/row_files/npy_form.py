"""Rows as two arrays of numpy: NAME.ids.npy, int64 (N,), and NAME.rows.npy, float32 (N, D)."""

# N = rows, D = embedding dim

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError
from shardkeep.row_files.form import CHUNK_ROWS, Chunk, RowFile, RowForm

_SUFFIX = ".npy"


def _pair(path: Path) -> list[Path]:
    """Both files. `path` is NAME.npy, NAME.ids.npy or NAME.rows.npy."""
    name = path.name.removesuffix(_SUFFIX).removesuffix(".ids").removesuffix(".rows")
    return [path.with_name(f"{name}.ids{_SUFFIX}"), path.with_name(f"{name}.rows{_SUFFIX}")]


class _Writer:
    def __init__(self, paths: Sequence[Path], dim: int, rows: int) -> None:
        self._files = [path.open("wb") for path in paths]
        for file, kind, shape in zip(self._files, ("<i8", "<f4"), ((rows,), (rows, dim)), strict=True):
            np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})

    def add(self, ids_N: Ids, rows_ND: Rows) -> None:
        for file, array in zip(self._files, (ids_N, rows_ND), strict=True):
            file.write(np.ascontiguousarray(array).reshape(-1).data)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for file in self._files:
                closing.callback(file.close)


def _open(path: Path) -> RowFile:
    ids_path, rows_path = _pair(path)
    ids_N, rows_ND = _mapped(ids_path), _mapped(rows_path)
    if ids_N.ndim != 1 or ids_N.dtype.kind != "i":
        raise DataError(f"{ids_path}: is {ids_N.dtype} {ids_N.shape}; allowed: int64 (N,)")
    if rows_ND.ndim != 2 or rows_ND.dtype != np.float32:
        raise DataError(f"{rows_path}: is {rows_ND.dtype} {rows_ND.shape}; allowed: float32 (N, dim)")
    if len(ids_N) != len(rows_ND):
        raise DataError(f"{rows_path}: has {len(rows_ND)} rows, {ids_path.name} {len(ids_N)} ids")
    return RowFile(rows_path, len(ids_N), rows_ND.shape[1], lambda: _chunks(ids_N, rows_ND))


def _chunks(ids_N: Any, rows_ND: Any) -> Iterator[Chunk]:
    for begin in range(0, len(ids_N), CHUNK_ROWS):
        some = slice(begin, begin + CHUNK_ROWS)
        yield np.array(ids_N[some], np.int64), np.array(rows_ND[some], np.float32, order="C")


def _mapped(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python code, so a damaged one raises anything
        raise DataError(f"{path}: is no array of numpy ({' '.join(str(error).split())[:200]})") from error


ENTRY = RowForm("npy", _SUFFIX, _pair, _Writer, _open)
