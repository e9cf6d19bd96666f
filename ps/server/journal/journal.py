"""Journal: a server's append-only log of the pushes it received, in segments that a restart replays.

    journal/
      lock                     flock of the process that may write, with its pid
      base                     the step whose checkpoint the oldest segment follows; no file = step 0
      g000003-000001.journal   generation 3, segment 1: a header, then records, each padded to 8 bytes
      g000003-000002.journal   every segment's first record is its GENERATION

This module has the lock and the list of segments; one segment is in `ps/server/journal/segments.py`, the thread that
syncs records in `ps/server/journal/group_commit.py`. It knows neither the content of a push nor when it is applied.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import JournalError
from shardkeep.base.files import atomic_write, make_folder, owner_lock, sync_folder
from shardkeep.base.sizes import size_text
from shardkeep.ps.server.journal.group_commit import GroupCommit
from shardkeep.ps.server.journal.segments import (
    EMPTY,
    FDATASYNC,
    SEGMENT_HEAD,
    DiskFailed,
    JournalRecord,
    OpenSegment,
    Parts,
    RecordKind,
    Segment,
    WriteBehind,
    failing,
    last_step,
    record_parts,
    segments_in,
)

__all__ = ["EMPTY", "KEPT", "Journal", "JournalEnd", "JournalRecord", "RecordKind"]

T = TypeVar("T")
_BASE = "base"
GIVEN_UP = 2**62
"""The base of a log that was given up because of its size or its disk."""
KEPT: Future[None] = Future()
"""The result for a record that is written, or that no log takes."""
KEPT.set_result(None)


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """Where the records end that were replayed: byte `byte` of file `path`.

    `dropped`: the step of the last whole record after the end; -1 = there is none, as after a crash."""

    path: Path
    byte: int
    dropped: int = -1


class Journal:
    """A server's log. One process at a time may have it open; its threads may share it.

    Never appends to a segment of an earlier process. If the disk fails while it writes, it gives the log up: it deletes
    what it has and takes no records, until `roll` can begin another segment."""

    def __init__(
        self,
        folder: Path,
        *,
        sync: bool,
        segment_bytes: int = 64 << 20,
        lock_s: float = 10.0,
        limit_bytes: int | None = None,
        on_given_up: Callable[[str], None] = lambda _why: None,
        fdatasync: Callable[[int], None] = FDATASYNC,
    ) -> None:
        """Creates the folder and takes its lock.

        `sync`: sync every record to disk, so that it survives a machine failure; else it survives only the process.
        `segment_bytes`: size at which the next record starts another segment. Blocks up to `lock_s` seconds while
        another process holds the lock, then raises JournalError with its pid. `limit_bytes`: size of all segments above
        which the log is given up; None = no limit. `on_given_up`: called with the reason; must not block. `fdatasync`:
        syncs the file of a descriptor. Raises JournalError."""
        self._folder, self._sync, self._segment_bytes, self._fdatasync = folder, sync, segment_bytes, fdatasync
        self._limit_bytes, self._on_given_up = limit_bytes, on_given_up
        self._given_up = False
        self._guard = threading.RLock()
        self._open: OpenSegment | None = None
        self._begun: tuple[int, Parts] | None = None  # the generation, and its record
        self._commits: GroupCommit[tuple[int, Parts]] | None = None
        self._behind = WriteBehind()
        with failing(folder, "cannot be written"):
            make_folder(folder)
            self._lock: int | None = _take_lock(folder, lock_s)
            self._segments = segments_in(folder)
        self._replayed = not self._segments
        self._reading: Segment | None = None
        self.end: JournalEnd | None = None
        """Where `replay` ended the log; None = it has not, or there were no segments."""

    def replay(self) -> Iterator[JournalRecord]:
        """Yields all records, oldest first, up to the first that is damaged or missing, and cuts the log there: what
        comes after is no continuation. Raises JournalError for a segment of another format."""
        with self._guard:
            segments = list(self._segments)
        self._reading = before = None
        for segment in segments:
            if before is not None and not (before.whole and segment.follows(before)):
                break
            self._reading = before = segment
            yield from segment.records()
        self.cut()

    def cut(self) -> None:
        """Ends the log before the record that `replay` yielded last, or where it ended. Deletes what comes after, the
        newest first, so that another process reads the same."""
        self._replayed = True
        if (segment := self._reading) is None:
            return
        with self._while_disk_works():
            later = self._segments[self._segments.index(segment) + 1 :]
            rests = [] if segment.whole else [(segment, segment.read)]
            dropped = [last_step(one.content(), at) for one, at in [*rests, *((one, 0) for one in later[-1:])]]
            self.end = JournalEnd(segment.path, segment.read, max(dropped, default=-1))
            if segment.whole and not later:
                return
            self._shut()
            for one in reversed(later):
                self._delete(one)
            if segment.read <= SEGMENT_HEAD:
                self._delete(segment)
            else:
                self._truncate(segment)
            self._sync_folder()

    def begin(self, generation: int, *, step: int, facts: Mapping[str, Any], sync: bool | None = None) -> None:
        """Starts a segment of a generation, not lower than the last. Its first record is GENERATION with `step`.

        `facts` (JSON types): the record's body. `sync`: as in the constructor, from now on; None = as before. If the
        caller has not replayed the log, this call does and discards the records."""
        if not self._replayed:  # nothing can follow a torn record
            deque(self.replay(), maxlen=0)
        body = np.frombuffer(json.dumps(dict(facts)).encode("utf-8"), dtype=np.uint8)
        self._drain()
        with self._while_disk_works():
            self._sync = self._sync if sync is None else sync
            self._begun = generation, record_parts(RecordKind.GENERATION, 0, step, body)
            if not self._given_up:
                self._start(*self._begun)
        if self._sync and self._commits is None:
            self._commits = GroupCommit(self._commit)

    def append(self, entry: RecordKind, *, rank: int, step: int, body: npt.NDArray[np.uint8] = EMPTY) -> Future[None]:
        """Adds a record. When the result is there, it survives the process, and with `sync` a machine failure, or the
        log has been given up. Without `sync` the result is there on return.

        An APPLIED record is synced with the next other record, because the pushes say the same. `body`: C-contiguous
        and not copied; do not change it before the result is there. The result or the call raises JournalError."""
        if self._given_up:
            return KEPT
        parts = record_parts(entry, rank, step, body)
        if self._commits is not None:
            return self._commits.add((step, parts), lane=rank, awaited=entry is not RecordKind.APPLIED)
        with self._while_disk_works():
            self._write(step, parts)
        return KEPT

    def _commit(self, records: list[tuple[int, Parts]]) -> None:
        """Writes records and syncs them together."""
        with self._while_disk_works():
            for step, parts in records:
                self._write(step, parts)
            self._sync_open()

    def _write(self, step: int, parts: Parts) -> None:
        """Writes a record to the open segment, or to the next one where that is full. Under the lock."""
        if self._given_up:
            return
        opened = self._begun_with(self._open)
        if opened.segment.size >= self._segment_bytes and opened.segment.highest >= 0:
            self._start(*self._begun_with(self._begun))
            if self._limit_bytes is not None and (size := self.size_bytes) > self._limit_bytes:
                self._give_up(f"it has {size_text(size)} (recovery.max_journal_bytes)")
                return
        opened = self._begun_with(self._open)
        with failing(opened.segment.path, "cannot be written"):
            opened.write(parts)
        opened.segment.highest = max(opened.segment.highest, step)

    def _sync_open(self) -> None:
        if self._open is not None:
            with failing(self._open.segment.path, "cannot be written"):
                self._open.sync()

    def _drain(self) -> None:
        """Blocks until the records that wait are written. Not under the lock."""
        if self._commits is not None:
            self._commits.drain()

    def roll(self) -> None:
        """Closes the open segment and starts the next, with the same GENERATION record. A log that was given up takes
        records again: they build on the checkpoint that the caller takes."""
        self._drain()
        with self._while_disk_works():
            if self._given_up:  # also where the disk could not take the note
                self._build_on(GIVEN_UP)
            self._start(*self._begun_with(self._begun))
            self._given_up = False

    @contextlib.contextmanager
    def _while_disk_works(self) -> Iterator[None]:
        """Locks the log, and gives it up if the disk fails inside. The first failure is reported."""
        with self._guard:
            try:
                yield
            except DiskFailed as error:
                self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Deletes all it has, the newest first: what a crash in between leaves is an earlier state. Deleting comes
        before the note, which may need the space."""
        first, self._given_up = not self._given_up, True
        with contextlib.suppress(DiskFailed):
            self._shut()
            for segment in reversed(self._segments):
                self._delete(segment)
            self._build_on(GIVEN_UP)
            self._sync_folder()
        if first:
            self._on_given_up(why)

    def to_disk(self) -> None:
        """Syncs all records to disk, so that they survive a machine failure."""
        self._drain()
        with self._guard:
            for segment in self._segments:
                segment.to_disk(self._fdatasync)
            self._sync_folder()

    def forget_before(self, step: int) -> None:
        """Deletes the oldest segments whose records are all of steps below `step`, except the newest segment."""
        with self._while_disk_works():
            if self.base == GIVEN_UP and not self._given_up:
                self._build_on(step)
            doomed = list(takewhile(lambda s: self._replayed and s.highest < step, self._segments[:-1]))
            if doomed:
                self._build_on(max(self.base, 1 + max(segment.highest for segment in doomed)))
                for segment in doomed:
                    self._delete(segment)
                self._sync_folder()

    @property
    def base(self) -> int:
        """The step of the earliest checkpoint on which the records build; 0 = they need none."""
        try:
            return int((self._folder / _BASE).read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise DiskFailed(f"{self._folder / _BASE}: cannot be read ({error})") from error

    def build_on(self, step: int) -> None:
        """Records that the log builds on the checkpoint of `step`."""
        with self._while_disk_works():
            self._build_on(step)

    def _build_on(self, step: int) -> None:
        self._check_lock()
        with failing(self._folder / _BASE, "cannot be written"):
            atomic_write(self._folder / _BASE, f"{step}\n")
            self._sync_folder()

    def clear(self) -> None:
        """Deletes all segments, because the job starts again from step 0."""
        self._drain()
        with self._while_disk_works():
            self._given_up, self._begun = False, None
            self._shut()
            for segment in reversed(self._segments):  # a crash in between leaves a valid earlier state
                self._delete(segment)
            self._build_on(0)
            self._replayed = True
            self._sync_folder()

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in list(self._segments))

    def close(self) -> None:
        """Writes what waits and releases the lock. Idempotent."""
        if self._commits is not None:
            self._commits.close()
        with self._guard:
            self._shut()
            self._behind.close()
            if self._lock is not None:
                os.close(self._lock)
            self._lock = None

    def _begun_with(self, part: T | None) -> T:
        """The part of the log, which `begin` makes. Raises JournalError if it is not there."""
        if part is None:
            raise JournalError(f"{self._folder}: no segment is open; call begin() first")
        return part

    def _check_lock(self) -> None:
        if self._lock is None:
            raise JournalError(f"{self._folder}: the journal is closed")

    def _start(self, generation: int, start: Parts) -> None:
        """Creates a segment with its first record, whole or not at all. On failure, the segment before stays open.

        Syncs the segment before first, so that a machine failure shortens the last segment alone."""
        self._check_lock()
        last = self._segments[-1] if self._segments else None
        if last is not None and generation < last.generation:
            raise JournalError(f"{self._folder}: holds generation {last.generation}; {generation} cannot follow it")
        number = last.number + 1 if last is not None and last.generation == generation else 1
        path = self._folder / f"g{generation:06d}-{number:06d}.journal"
        if last is not None:
            last.to_disk(self._fdatasync)
        with failing(path, "cannot be written"):
            segment = Segment(path, generation, number, 0)
            fdatasync = self._fdatasync if self._sync else None
            opened = OpenSegment(segment, start, fdatasync=fdatasync, behind=self._behind)
            try:
                self._sync_folder()
            except BaseException:
                opened.abandon()
                raise
        self._shut()
        self._open = opened
        self._segments.append(segment)

    def _shut(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with failing(opened.segment.path, "cannot be closed"):
                opened.close()

    def _delete(self, segment: Segment) -> None:
        self._check_lock()
        with failing(segment.path, "cannot be deleted"):
            segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)

    def _sync_folder(self) -> None:
        with failing(self._folder, "cannot be brought to disk"):
            sync_folder(self._folder)

    def _truncate(self, segment: Segment) -> None:
        """Cuts off what was not read."""
        self._check_lock()
        with failing(segment.path, "cannot be cut"), segment.path.open("r+b") as file:
            file.truncate(segment.read)
            os.fsync(file.fileno())
        segment.size, segment.whole = segment.read, True


def _take_lock(folder: Path, limit_s: float) -> int:
    """The descriptor that holds the folder's lock."""
    try:
        return owner_lock(folder / "lock", limit_s=limit_s)
    except TimeoutError as error:
        raise JournalError(f"{folder}: {error}; end that process first: two cannot write the same journal") from error
    except OSError as error:
        raise JournalError(
            f"{folder / 'lock'}: cannot be locked ({error.strerror or error}), and without a lock two processes could "
            "write the same journal; use a local disk, or NFS with locks"
        ) from error
