"""Segments of a journal: files to which one process appends records. journal.py has the list of segments.

A segment is a header, then records, each with a checksum and padded to 8 bytes. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import queue
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shardkeep.base.errors import JournalError
from shardkeep.base.files import let_go, write_all

_Range = tuple[Path, int, int]  # file, first byte, number of bytes

FORMAT = 2
"""Of segments, with messages of `VERSION` 4. Tables with policies have not changed it: a replay repeats their decisions
from the pushes."""
EMPTY: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
_SEGMENT = struct.Struct("<8sQQQ")  # magic, format, generation, number; then their checksum
_MAGIC = b"skjournl"
_RECORD = struct.Struct("<HHIqQ")  # mark, entry, rank, step, bytes of the body; then a checksum of all and the body
_MARK = 0xA95C
_SUM = struct.Struct("<Q")
FDATASYNC: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
"""macOS has only the second."""
SEGMENT_HEAD = _SEGMENT.size + _SUM.size
_RECORD_HEAD = _RECORD.size + _SUM.size
_ZEROS = bytes(8)
LOST = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}  # reads of bytes that the disk has lost

Parts = Sequence[bytes | memoryview]


class RecordKind(enum.IntEnum):
    """The kind of a record: a push arrived, a step was applied, a generation began."""

    PUSH = 1
    APPLIED = 2
    GENERATION = 3


_STARTS = np.array([_MARK | entry << 16 for entry in RecordKind], dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record. `body` (uint8): a view that keeps its whole segment in memory; the reader may change it."""

    entry: RecordKind
    rank: int
    step: int
    body: npt.NDArray[np.uint8]


def record_parts(entry: RecordKind, rank: int, step: int, body: npt.NDArray[np.uint8]) -> Parts:
    """The bytes of a record on disk. Does not copy the body."""
    fields = _RECORD.pack(_MARK, entry, rank, step, body.nbytes)
    return [fields + _SUM.pack(_checksum(fields, body)), body.data, _ZEROS[: -body.nbytes % 8]]


def _checksum(fields: bytes, body: npt.NDArray[np.uint8]) -> int:
    """xxh3 of the body, seeded with that of the fields: one call each, and no copy joins them."""
    return xxhash.xxh3_64_intdigest(body.data, seed=xxhash.xxh3_64_intdigest(fields))


def segment_head(generation: int, number: int) -> bytes:
    """The header of a segment, SEGMENT_HEAD bytes."""
    fields = _SEGMENT.pack(_MAGIC, FORMAT, generation, number)
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def format_of(head: bytes) -> int | None:
    """The format number in a segment's header; None = not a valid header."""
    magic, version, _, _ = _SEGMENT.unpack_from(head)
    whole = magic == _MAGIC and head[_SEGMENT.size :] == _SUM.pack(xxhash.xxh3_64_intdigest(head[: _SEGMENT.size]))
    return int(version) if whole else None


def record_at(data: npt.NDArray[np.uint8], offset: int) -> tuple[JournalRecord, int] | None:
    """The record at `offset`, a multiple of 8, and the offset of the next; None = no whole record."""
    start = offset + _RECORD_HEAD
    if start > data.size:
        return None
    mark, entry, rank, step, size = _RECORD.unpack_from(data.data, offset)
    if mark != _MARK or not RecordKind.PUSH <= entry <= RecordKind.GENERATION or start + size + -size % 8 > data.size:
        return None
    body = data[start : start + size]
    fields = data[offset : offset + _RECORD.size].tobytes()
    if _SUM.unpack_from(data.data, offset + _RECORD.size)[0] != _checksum(fields, body):
        return None
    return JournalRecord(RecordKind(entry), rank, step, body), start + size + -size % 8


def last_step(data: npt.NDArray[np.uint8], offset: int) -> int:
    """The step of the last whole record from `offset` on; -1 = there is none.

    Searches all offsets, because the length of a damaged record may be wrong."""
    marks = data[offset : data.size // 8 * 8].view("<u4")[::2]
    starts = np.flatnonzero(np.isin(marks, _STARTS)) * 8 + offset
    return next((found[0].step for start in starts[::-1].tolist() if (found := record_at(data, start))), -1)


_NAME = re.compile(r"g(\d{6,})-(\d{6,})\.journal")


@dataclass(eq=False, slots=True)
class Segment:
    """A segment's file, its size, and the highest step of PUSH and APPLIED records (-1: none).

    `read`: where the records end that were read and not refused. `whole`: whether that is the end of the file."""

    path: Path
    generation: int
    number: int
    size: int
    highest: int = -1
    read: int = 0
    whole: bool = False

    def records(self) -> Iterator[JournalRecord]:
        """Yields the records, up to a damaged one. Raises JournalError for a segment of another format."""
        data = self.content()
        self.read, self.whole = _records_start(self, data), False
        while self.read and (whole := record_at(data, self.read)) is not None:
            record, end = whole
            yield record
            self.read = end
            if record.entry is not RecordKind.GENERATION:
                self.highest = max(self.highest, record.step)
        self.whole = self.read == self.size > SEGMENT_HEAD

    def follows(self, before: Segment) -> bool:
        """Whether no segment between the two is missing. Generations may be: a server is not in each."""
        if self.generation > before.generation:
            return self.number == 1
        return self.number == before.number + 1

    def content(self) -> npt.NDArray[np.uint8]:
        """The file in memory, up to where the disk has lost it. With a mapping, a bad disk would be a SIGBUS."""
        data, size = np.empty(self.size, dtype=np.uint8), 0
        with failing(self.path, "cannot be read", besides=LOST), self.path.open("rb", buffering=0) as file:
            while read := file.readinto(data.data[size:]):
                size += read
        return data[:size]

    def to_disk(self, fdatasync: Callable[[int], None]) -> None:
        """Syncs the file, so that it survives a machine failure."""
        with failing(self.path, "cannot be brought to disk"), self.path.open("rb") as file:
            fdatasync(file.fileno())


class OpenSegment:
    """The segment to which records are appended. Not thread safe. Raises OSError if the disk fails."""

    def __init__(
        self, segment: Segment, start: Parts, *, fdatasync: Callable[[int], None] | None, behind: WriteBehind
    ) -> None:
        """Creates the file with the segment's header and first record, a GENERATION.

        `fdatasync`: syncs the file of a descriptor; None = no file is synced."""
        self.segment = segment
        self._fdatasync = fdatasync
        self._behind = behind
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._descriptor = os.open(segment.path, flags, 0o666)
        try:
            self.write([segment_head(segment.generation, segment.number), *start])
            self.sync()
        except BaseException:
            self.abandon()
            raise

    def write(self, parts: Parts) -> None:
        """Appends all parts. If that fails, the file may hold a torn record."""
        written = write_all(self._descriptor, parts)
        segment = self.segment
        segment.size += written
        self._behind.grew(segment.path, segment.size - written, segment.size)

    def sync(self) -> None:
        """Makes what was written survive a machine failure, where files are synced."""
        if self._fdatasync is not None:
            self._fdatasync(self._descriptor)

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
    matches = [(m, path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)) is not None]
    segments = [Segment(path, int(m[1]), int(m[2]), path.stat().st_size) for m, path in matches]
    return sorted(segments, key=lambda segment: (segment.generation, segment.number))


class DiskFailed(JournalError):
    """The system refused to read or write a file of the journal."""


@contextlib.contextmanager
def failing(path: Path, how: str, *, besides: Container[int | None] = ()) -> Iterator[None]:
    """Turns an OSError inside into a DiskFailed; those with the numbers `besides` end the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in besides:
            raise DiskFailed(f"{path}: {how} ({error.strerror or error})") from error


def _records_start(segment: Segment, data: npt.NDArray[np.uint8]) -> int:
    """The offset of the first record; 0 = the header is not whole. Raises JournalError for another format."""
    head = data[:SEGMENT_HEAD].tobytes()
    if head == segment_head(segment.generation, segment.number):
        return SEGMENT_HEAD
    version = format_of(head) if len(head) == SEGMENT_HEAD else None
    if version not in (None, FORMAT):
        raise JournalError(
            f"{segment.path}: format {version}; this version reads {FORMAT}; resume the job from its last checkpoint "
            "(shardkeep train --resume), or use the version of shardkeep that wrote it"
        )
    return 0


class WriteBehind:
    """Hints to the system, from its own thread, which bytes of growing files will not be read soon.

    It changes neither a file nor its durability. If a system or disk ignores the hint, nothing fails.
    """

    def __init__(self, *, chunk_bytes: int = 8 << 20, kept_bytes: int = 32 << 20) -> None:
        """`chunk_bytes`: the growth of a file that triggers a hint. `kept_bytes`: the newest bytes of all files that
        stay in the page cache."""
        self._chunk, self._kept = chunk_bytes, kept_bytes
        self._queue: queue.SimpleQueue[_Range | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def grew(self, path: Path, before: int, size: int) -> None:
        """Records that a file has grown from `before` to `size` bytes."""
        if size // self._chunk > before // self._chunk:
            self._tell(path, before // self._chunk * self._chunk, size // self._chunk * self._chunk)

    def ended(self, path: Path, size: int) -> None:
        """Hints the bytes after the last whole chunk of a file that will not grow further."""
        if size >= self._chunk:
            self._tell(path, size // self._chunk * self._chunk, size)

    def close(self, limit_s: float | None = 1.0) -> None:
        """Ends the thread. Waits for it up to `limit_s`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(limit_s)
            self._thread = None

    def _tell(self, path: Path, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter exits: the pages stay in the cache
                return
            self._thread = thread
        self._queue.put((path, start, stop - start))

    def _run(self) -> None:
        kept: deque[_Range] = deque()
        while (byte_range := self._queue.get()) is not None:
            let_go(*byte_range)  # starts writing these bytes
            kept.append(byte_range)
            while len(kept) > 1 and sum(size for _, _, size in kept) > self._kept:
                let_go(*kept.popleft())  # written by now if the disk keeps up, so the pages are dropped
