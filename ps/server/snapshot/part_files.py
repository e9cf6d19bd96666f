"""PartFiles: the files of one server's rows, written part by part. files.py describes the format.

ArrayFile writes one safetensors file array by array and holds none of them in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

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

    def finish(self) -> bytes:
        """Writes the header, which it returns, and closes the file. Does not sync it to disk."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        header = (HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8)
        self._file.seek(0)
        self._file.write(header)
        self._file.close()
        return header

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
    """Writes files of about `file_bytes` into a folder. A file's parts stay in memory until it is written: its header,
    with which its checksum begins, is known last.

    Args:
        pool: Its threads write the files.
        done: Called with the path and checksum of each file when it is written.
        before: Called before each file is made.
    """

    def __init__(
        self,
        folder: Path,
        file_bytes: int,
        pool: Executor,
        done: Callable[[Path, str], Future[FileRecord]],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts: list[FilePart] = []
        self.written: list[Any] = []
        """What `add` was given with the parts of written files."""
        self._folder, self._file_bytes, self._pool, self._done, self._before = folder, file_bytes, pool, done, before
        self._files: list[Future[Future[FileRecord]]] = []
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._kept: list[Any] = []

    def add(self, table: int, first: int, end: int, rows: StoredRows, kept: Any = None) -> None:
        """Adds one part. Raises what writing an earlier file raised."""
        self._arrays |= {f"{table}.{first}.{what}": array for what, array in rows.arrays().items()}
        self._kept.append(kept)
        self.parts.append(FilePart(table, len(self._files), first, end, rows.ids_N.size))
        size = sum(array.nbytes for array in self._arrays.values())
        if size >= self._file_bytes or len(self._arrays) + 5 > _MOST_ARRAYS:
            self._finish()

    def finish(self) -> Iterator[FileRecord]:
        """Completes the last file. Yields the records of all, each once it is done. Raises OSError."""
        if self._arrays:
            self._finish()
        for file in self._files:
            yield file.result().result()

    def _finish(self) -> None:
        for file in self._files:
            if file.done():
                file.result()
        path = self._folder / file_name(len(self._files))
        self._files.append(self._pool.submit(self._write, path, self._arrays, self._kept))
        self._arrays, self._kept = {}, []

    def _write(self, path: Path, arrays: dict[str, npt.NDArray[Any]], kept: list[Any]) -> Future[FileRecord]:
        self._before()
        with contextlib.closing(ArrayFile(path)) as file:
            for name, array in arrays.items():
                file.add(name, array)
            checksum = xxhash.xxh3_128(file.finish())
        for array in arrays.values():
            checksum.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.written += kept
        return self._done(path, checksum.hexdigest())
