"""PartFiles: the files of one server's rows, written part by part. files.py describes the format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.ps.checkpoints import FileRecord
from shardkeep.ps.shard.snapshot.array_file import ArrayFile
from shardkeep.ps.shard.snapshot.index import file_name
from shardkeep.ps.shard.snapshot.snapshot import Columns


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one table whose ids fall into buckets [first, end)."""

    table: int
    file: int
    first: int
    end: int
    rows: int

    def to_json(self) -> list[int]:
        """As in the index."""
        return [self.table, self.file, self.first, self.end, self.rows]


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
        self.parts: list[Part] = []
        self.records: list[Future[FileRecord]] = []
        self._folder, self._file_bytes, self._done, self._before = folder, file_bytes, done, before
        self._file: ArrayFile | None = None

    def add(self, table: int, first: int, end: int, columns: Columns, num_counters: int = 0) -> None:
        """Writes one part. `num_counters`: counters of a row, behind its optimizer slots."""
        if self._file is None:
            self._before()
            self._file = ArrayFile(self._folder / file_name(len(self.records)))
        arrays: dict[str, npt.NDArray[Any]] = {"ids": columns.ids_K, "rows": columns.rows_KD, "slots": columns.slots_KS}
        if num_counters:
            arrays["slots"] = np.ascontiguousarray(columns.slots_KS[:, :-num_counters])
            arrays["counters"] = np.ascontiguousarray(columns.slots_KS[:, -num_counters:]).view(np.uint32)
        for what, array in arrays.items():
            self._file.add(f"{table}.{first}.{what}", array)
        self.parts.append(Part(table, len(self.records), first, end, columns.ids_K.size))
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
