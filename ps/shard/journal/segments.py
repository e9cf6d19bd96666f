"""Segments of a journal: files to which one process appends records, whole or not at all.

Knows files. The bytes of a record are in `ps/shard/journal/format.py`, the list of segments in journal.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import JournalError
from shardkeep.base.files import write_all
from shardkeep.ps.shard.journal.format import (
    FORMAT,
    SEGMENT_HEAD,
    Entry,
    Parts,
    Record,
    format_of,
    record_after,
    record_at,
    segment_head,
)
from shardkeep.ps.shard.journal.write_behind import WriteBehind

_NAME = re.compile(r"g(\d{6,})-(\d{6,})\.journal")


@dataclass(eq=False, slots=True)
class Segment:
    """A segment's file, the size of its whole records, and the highest step of PUSH and APPLIED records (-1: none)."""

    path: Path
    generation: int
    number: int
    size: int
    highest: int = -1

    def records(self, cut: Callable[[Segment, int], None] | None) -> Iterator[Record]:
        """Yields the records, up to a torn one. `cut`: truncates a torn segment; None = a torn segment is an error.

        Raises JournalError with file and byte if the segment is damaged."""
        with failing(self.path, "cannot be read"):
            data = _content(self)
        end = _records_start(self, data)
        while end and (found := record_at(data, end)) is not None:
            record, end = found
            if record.entry is not Entry.GENERATION:
                self.highest = max(self.highest, record.step)
            yield record
        if end == data.size and end > SEGMENT_HEAD:
            return
        if cut is None or record_after(data, end):
            raise _damaged(self.path, end)
        cut(self, end)


class OpenSegment:
    """The segment to which records are appended. Not thread safe. Raises OSError if the disk fails.

    `start`: its first record, a GENERATION."""

    def __init__(self, segment: Segment, start: Parts, *, sync: bool, behind: WriteBehind) -> None:
        """Creates the file with the segment's header and first record."""
        self.segment = segment
        self.start = start
        self._sync = sync
        self._behind = behind
        self._unsure = False  # the file may hold more than whole records
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._descriptor = os.open(segment.path, flags, 0o666)
        try:
            self.write([segment_head(segment.generation, segment.number), *start])
        except BaseException:
            self.abandon()
            raise

    def write(self, parts: Parts) -> None:
        """Appends all parts, or none."""
        self.mend()
        self._unsure = True
        try:
            written = write_all(self._descriptor, parts)
            if self._sync:
                os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # the next write tries again, or replay cuts the torn record
                self.mend()
            raise
        segment = self.segment
        segment.size += written
        self._unsure = False
        self._behind.grew(segment.path, segment.size - written, segment.size)

    def mend(self) -> None:
        """Cuts off the remains of a failed or interrupted write."""
        if self._unsure:
            os.ftruncate(self._descriptor, self.segment.size)
            self._unsure = False

    def close(self) -> None:
        """Closes the file after its last record."""
        os.close(self._descriptor)
        self._behind.ended(self.segment.path, self.segment.size)

    def abandon(self) -> None:
        """Closes and deletes the file of a segment that could not be started."""
        os.close(self._descriptor)
        self.segment.path.unlink(missing_ok=True)


def segments_in(folder: Path) -> list[Segment]:
    """The segments of a folder, oldest first. Raises OSError."""
    found = [(m, path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)) is not None]
    segments = [Segment(path, int(m[1]), int(m[2]), path.stat().st_size) for m, path in found]
    return sorted(segments, key=lambda segment: (segment.generation, segment.number))


@contextlib.contextmanager
def failing(path: Path, how: str) -> Iterator[None]:
    """Turns an OSError inside into a JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"{path}: {how} ({error.strerror or error})") from error


def _content(segment: Segment) -> npt.NDArray[np.uint8]:
    """Reads the segment into memory. With a mapping, a bad disk would be a SIGBUS instead of an OSError."""
    data = np.empty(segment.size, dtype=np.uint8)
    with segment.path.open("rb") as file:
        return data[: file.readinto(data.data)]


def _records_start(segment: Segment, data: npt.NDArray[np.uint8]) -> int:
    """The offset of the first record; 0 = a crash came before the header was written. Raises JournalError."""
    head = data[:SEGMENT_HEAD].tobytes()
    if head == segment_head(segment.generation, segment.number):
        return SEGMENT_HEAD
    if len(head) < SEGMENT_HEAD or not any(head):
        return 0
    version = format_of(head)
    if version not in (None, FORMAT):
        raise JournalError(
            f"{segment.path}: format {version}; this version reads {FORMAT}; resume the job from its last checkpoint "
            "(shardkeep train --resume), or use the version of shardkeep that wrote it"
        )
    raise _damaged(segment.path, 0)


def _damaged(path: Path, offset: int) -> JournalError:
    return JournalError(
        f"{path}: damaged at byte {offset}; resume the job from its last checkpoint (shardkeep train --resume), which "
        "needs no journal"
    )
