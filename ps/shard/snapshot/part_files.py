"""PartFiles: the files of one server's rows, written part by part. files.py describes the format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from shardkeep.ps.checkpoints import FileRecord
from shardkeep.ps.shard.snapshot.array_file import ArrayFile
from shardkeep.ps.shard.snapshot.index import file_name
from shardkeep.ps.shard.table.stored_rows import StoredRows


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

    def add(self, table: int, first: int, end: int, rows: StoredRows) -> None:
        """Writes one part."""
        if self._file is None:
            self._before()
            self._file = ArrayFile(self._folder / file_name(len(self.records)))
        for what, array in rows.arrays().items():
            self._file.add(f"{table}.{first}.{what}", array)
        self.parts.append(Part(table, len(self.records), first, end, rows.ids_N.size))
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
