"""PartFiles: the files of one server's rows, written part by part. files.py describes the format.

ArrayFile writes one safetensors file array by array and holds none of them in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkeep.ps.checkpoints.folder import FileRecord
from shardkeep.ps.checkpoints.index import file_name
from shardkeep.ps.server.table.stored_rows import StoredRows

HEADER_BYTES = 16 << 10
"""Room for the header. It comes first in the file but is known last; the format allows padding with spaces."""
_MOST_ARRAYS = 122
_KINDS = {"int64": "I64", "float32": "F32", "float16": "F16", "uint16": "U16", "int8": "I8", "uint32": "U32"}


class ArrayFile:
    """A safetensors file of consecutive arrays, each with a name of up to 32 characters. Valid after `finish`.

    Format: https://huggingface.co/docs/safetensors. All methods except `close` raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb")
        self._file.seek(HEADER_BYTES)
        self._header: dict[str, dict[str, Any]] = {}

    @property
    def has_room(self) -> bool:
        """Whether the header has room for five more arrays."""
        return len(self._header) + 5 <= _MOST_ARRAYS

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes a contiguous array, int64, float32, float16, uint16, int8 or uint32."""
        kind = _KINDS[array.dtype.name]
        offsets = [self.size, self.size + array.nbytes]
        self._header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        self._file.write(np.ascontiguousarray(array).reshape(-1).data)
        self.size += array.nbytes

    def extend(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes an array part by part along its first axis; no other array comes between the parts."""
        rows = self._header[name]["shape"][0] if name in self._header else 0
        first = self._header[name]["data_offsets"][0] if name in self._header else self.size
        self.add(name, array)
        self._header[name]["shape"][0] += rows
        self._header[name]["data_offsets"][0] = first

    def finish(self) -> None:
        """Writes the header and closes the file. Does not sync it to disk."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
        self._file.close()

    def close(self) -> None:
        """Closes the file, even if it is incomplete."""
        with contextlib.suppress(OSError):
            self._file.close()


class FilePart(NamedTuple):
    """Rows of one table whose ids fall into buckets [first, end), as in the index."""

    table: int
    file: int
    first: int
    end: int
    rows: int


class PartFiles:
    """Writes files of about `file_bytes` into a folder. All methods except `close` raise OSError.

    Args:
        done: Called with each file when it is written; its result is kept in `records`.
        before: Called before each file is made.
    """

    def __init__(
        self,
        folder: Path,
        file_bytes: int,
        done: Callable[[Path], Future[FileRecord]],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts: list[FilePart] = []
        self.records: list[Future[FileRecord]] = []
        self._folder, self._file_bytes, self._done, self._before = folder, file_bytes, done, before
        self._file: ArrayFile | None = None

    def add(self, table: int, first: int, end: int, rows: StoredRows) -> None:
        """Writes one part."""
        if self._file is None:
            self._before()
            self._file = ArrayFile(self._folder / file_name(len(self.records)))
        for what, array in rows.arrays().items():
            self._file.add(f"{table}.{first}.{what}", array)
        self.parts.append(FilePart(table, len(self.records), first, end, rows.ids_N.size))
        if self._file.size >= self._file_bytes or not self._file.has_room:
            self.finish()

    def finish(self) -> None:
        """Completes the last file."""
        if self._file is not None:
            self._file.finish()
            self.records.append(self._done(self._file.path))
            self._file = None

    def close(self) -> None:
        """Closes an incomplete file. Idempotent."""
        if self._file is not None:
            self._file.close()
