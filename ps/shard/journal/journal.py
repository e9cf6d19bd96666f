"""A server's journal: an append-only log of the pushes it took and applied, in segments that a restart replays.

    journal/
      lock                     flock of the process that may write, with its pid
      base                     the step whose checkpoint the oldest segment follows; no file = step 0
      g000003-000001.journal   generation 3, segment 1: a header, then records, each padded to 8 bytes
      g000003-000002.journal   every segment's first record is its GENERATION

Knows files and the lock; the bytes are in `ps/shard/journal/format.py`. Not what a push holds, nor when it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import JournalError
from shardkeep.base.files import atomic_write, owner_lock, sync_folder, write_all
from shardkeep.ps.shard.journal.format import (
    EMPTY,
    FORMAT,
    SEGMENT_HEAD,
    Entry,
    Parts,
    Record,
    format_of,
    record_after,
    record_at,
    record_parts,
    segment_head,
)
from shardkeep.ps.shard.journal.write_behind import WriteBehind

__all__ = ["EMPTY", "Entry", "Journal", "Record"]

_BASE = "base"
_NAME = re.compile(r"g(\d{6,})-(\d{6,})\.journal")


@dataclass(eq=False, slots=True)
class _Segment:
    """A segment's file, its whole records' size, and the highest step of its PUSH and APPLIED records (-1: none)."""

    path: Path
    generation: int
    number: int
    size: int
    highest: int = -1


@dataclass(eq=False, slots=True)
class _Open:
    """The segment under way. `start`: its GENERATION record; `unsure`: the file may hold more than whole records."""

    segment: _Segment
    descriptor: int
    start: Parts
    unsure: bool = False


class Journal:
    """A server's log. One process at a time may have it open; its threads may share it.

    A segment of an earlier life is never appended to. Raises JournalError wherever the disk fails."""

    def __init__(self, folder: Path, *, sync: bool, segment_bytes: int = 64 << 20, lock_s: float = 10.0) -> None:
        """Makes the folder and takes its lock.

        `sync`: bring every record to disk, so that it survives the machine; else it survives the process.
        `segment_bytes`: size at which the next record starts another segment. Blocks up to `lock_s` seconds while
        another process holds the lock, then raises JournalError with its pid."""
        self._folder, self._sync, self._segment_bytes = folder, sync, segment_bytes
        self._guard = threading.RLock()
        self._open: _Open | None = None
        self._behind = WriteBehind()
        with _failing(folder, "cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _take_lock(folder, lock_s)
            self._segments = _segments_in(folder)
        self._replayed = not self._segments

    def replay(self) -> Iterator[Record]:
        """All records, oldest first. What a crash left torn at the end of the last segment is cut off on disk.

        Raises JournalError, naming file and byte, where something else is damaged."""
        with self._guard:
            segments = list(self._segments)
            torn = None if self._open or not segments else segments[-1]
        for segment in segments:
            yield from self._read(segment, may_cut=segment is torn)
        self._replayed = True

    def begin(self, generation: int, *, step: int, facts: Mapping[str, Any]) -> None:
        """Starts a segment of a generation, not lower than the last; its first record is GENERATION with `step` and
        `facts` (JSON types) as body. What an earlier life left is replayed unseen if the caller has not."""
        if not self._replayed:  # else its torn tail would no longer be the journal's last
            deque(self.replay(), maxlen=0)
        body = np.frombuffer(json.dumps(dict(facts)).encode("utf-8"), dtype=np.uint8)
        with self._guard:
            self._start(generation, record_parts(Entry.GENERATION, 0, step, body))

    def append(self, entry: Entry, *, rank: int, step: int, body: npt.NDArray[np.uint8] = EMPTY) -> None:
        """Adds a record: on return it survives the process, with `sync` the machine. `body`: C-contiguous, not copied,
        not to be changed meanwhile. Raises JournalError, with the journal as it was before and usable."""
        parts = record_parts(entry, rank, step, body)
        with self._guard:
            if self._opened().segment.size >= self._segment_bytes and self._opened().segment.highest >= 0:
                self.roll()
            opened = self._opened()
            with _failing(opened.segment.path, "cannot be written"):
                self._write(opened, parts)
            opened.segment.highest = max(opened.segment.highest, step)

    def roll(self) -> None:
        """Closes the open segment and starts the next, with the same GENERATION record."""
        with self._guard:
            opened = self._opened()
            self._start(opened.segment.generation, opened.start)

    def to_disk(self) -> None:
        """Brings all records to disk, so that they survive the machine as well."""
        with self._guard:
            for segment in self._segments:
                with _failing(segment.path, "cannot be brought to disk"), segment.path.open("rb") as file:
                    os.fsync(file.fileno())
            with _failing(self._folder, "cannot be brought to disk"):
                sync_folder(self._folder)

    def forget_before(self, step: int) -> None:
        """Deletes segments that hold pushes and applied markers of steps below `step` only; the newest stays."""
        with self._guard:
            doomed = [s for s in self._segments[:-1] if self._replayed and s.highest < step]
            if doomed:
                self.build_on(max(self.base, 1 + max(segment.highest for segment in doomed)))
            for segment in doomed:
                self._delete(segment)

    @property
    def base(self) -> int:
        """The step whose checkpoint, or a later one, the records follow; 0 = none is needed."""
        try:
            return int((self._folder / _BASE).read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise JournalError(f"{self._folder / _BASE}: cannot be read ({error})") from error

    def build_on(self, step: int) -> None:
        """Notes that the records follow the checkpoint of `step`."""
        with self._guard, _failing(self._folder / _BASE, "cannot be written"):
            if step != self.base:
                self._check_lock()
                atomic_write(self._folder / _BASE, f"{step}\n")

    def clear(self) -> None:
        """Deletes all segments: the job starts anew."""
        with self._guard:
            self._shut()
            for segment in reversed(self._segments):  # what a crash leaves is then a state that once was
                self._delete(segment)
            self.build_on(0)
            self._replayed = True
            self._sync_folder()

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        with self._guard:
            return sum(segment.size for segment in self._segments)

    def close(self) -> None:
        """Gives the lock back. Again: does nothing."""
        with self._guard:
            self._shut()
            self._behind.close()
            if self._lock is not None:
                os.close(self._lock)
            self._lock = None

    def _opened(self) -> _Open:
        if self._open is None:
            raise JournalError(f"{self._folder}: no segment is open; call begin() first")
        return self._open

    def _check_lock(self) -> None:
        if self._lock is None:
            raise JournalError(f"{self._folder}: the journal is closed")

    def _start(self, generation: int, start: Parts) -> None:
        """Makes a segment with its first record, whole or not at all; the one before stays open if this fails."""
        self._check_lock()
        last = self._segments[-1] if self._segments else None
        if last is not None and generation < last.generation:
            raise JournalError(f"{self._folder}: holds generation {last.generation}; {generation} cannot follow it")
        number = last.number + 1 if last is not None and last.generation == generation else 1
        path = self._folder / f"g{generation:06d}-{number:06d}.journal"
        with _failing(path, "cannot be written"):
            if self._open is not None:
                self._mend(self._open)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            opened = _Open(_Segment(path, generation, number, 0), os.open(path, flags, 0o666), start)
            try:
                self._write(opened, [segment_head(generation, number), *start])
                self._sync_folder()
            except BaseException:
                os.close(opened.descriptor)
                path.unlink(missing_ok=True)
                raise
        self._shut()
        self._open = opened
        self._segments.append(opened.segment)

    def _write(self, opened: _Open, parts: Parts) -> None:
        """Appends all parts, or none. Raises OSError."""
        self._mend(opened)
        opened.unsure = True
        try:
            written = write_all(opened.descriptor, parts)
            if self._sync:
                os.fdatasync(opened.descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # then the next record tries again, or replay cuts
                self._mend(opened)
            raise
        segment = opened.segment
        segment.size += written
        opened.unsure = False
        self._behind.grew(segment.path, segment.size - written, segment.size)

    def _mend(self, opened: _Open) -> None:
        """Cuts off what a failed or interrupted write left. Raises OSError."""
        if opened.unsure:
            os.ftruncate(opened.descriptor, opened.segment.size)
            opened.unsure = False

    def _shut(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            os.close(opened.descriptor)
            self._behind.ended(opened.segment.path, opened.segment.size)

    def _delete(self, segment: _Segment) -> None:
        self._check_lock()
        with _failing(segment.path, "cannot be deleted"):
            segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)

    def _sync_folder(self) -> None:
        if self._sync:
            sync_folder(self._folder)

    def _read(self, segment: _Segment, *, may_cut: bool) -> Iterator[Record]:
        """The records of a segment, up to where it is torn."""
        with _failing(segment.path, "cannot be read"):
            data = _content(segment)
        end = _records_start(segment, data)
        while end and (found := record_at(data, end)) is not None:
            record, end = found
            if record.entry is not Entry.GENERATION:
                segment.highest = max(segment.highest, record.step)
            yield record
        if end == data.size and end > SEGMENT_HEAD:
            return
        if not may_cut or record_after(data, end):
            raise _damaged(segment.path, end)
        with self._guard, _failing(segment.path, "cannot be cut"):
            self._check_lock()
            self._cut(segment, end)

    def _cut(self, segment: _Segment, size: int) -> None:
        """Leaves the first bytes of a segment, which hold whole records; deletes it if they hold none."""
        if size <= SEGMENT_HEAD:
            self._delete(segment)
        else:
            with segment.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
            segment.size = size
        self._sync_folder()


def _take_lock(folder: Path, limit_s: float) -> int:
    """The descriptor that holds the folder's lock."""
    try:
        return owner_lock(folder / "lock", limit_s=limit_s)
    except TimeoutError as error:
        raise JournalError(f"{folder}: {error}; end that process first, two cannot write the same journal") from error
    except OSError as error:
        raise JournalError(
            f"{folder / 'lock'}: cannot be locked ({error.strerror or error}), and without a lock two processes could "
            "write the same journal; use a local disk, or NFS with locks"
        ) from error


def _segments_in(folder: Path) -> list[_Segment]:
    found = [(m, path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)) is not None]
    segments = [_Segment(path, int(m[1]), int(m[2]), path.stat().st_size) for m, path in found]
    return sorted(segments, key=lambda segment: (segment.generation, segment.number))


def _content(segment: _Segment) -> npt.NDArray[np.uint8]:
    """The segment in memory: a bad disk is then an error, where under a mapping it is a SIGBUS. Raises OSError."""
    data = np.empty(segment.size, dtype=np.uint8)
    with segment.path.open("rb") as file:
        return data[: file.readinto(data.data)]


def _records_start(segment: _Segment, data: npt.NDArray[np.uint8]) -> int:
    """Where the records start; 0 when a crash came before the segment's header. Raises JournalError."""
    head = data[:SEGMENT_HEAD].tobytes()
    if head == segment_head(segment.generation, segment.number):
        return SEGMENT_HEAD
    if len(head) < SEGMENT_HEAD or not any(head):
        return 0
    version = format_of(head)
    if version not in (None, FORMAT):
        raise JournalError(f"{segment.path}: format {version}; this version reads {FORMAT}")
    raise _damaged(segment.path, 0)


def _damaged(path: Path, offset: int) -> JournalError:
    return JournalError(
        f"{path}: damaged at byte {offset}; resume the job from its last checkpoint (shardkeep train --resume), which "
        "needs no journal"
    )


@contextlib.contextmanager
def _failing(path: Path, how: str) -> Iterator[None]:
    """An OSError inside becomes a JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"{path}: {how} ({error.strerror or error})") from error
