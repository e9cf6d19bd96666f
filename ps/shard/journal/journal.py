"""Journal: a server's append-only log of the pushes it received, in segments that a restart replays.

    journal/
      lock                     flock of the process that may write, with its pid
      base                     the step whose checkpoint the oldest segment follows; no file = step 0
      g000003-000001.journal   generation 3, segment 1: a header, then records, each padded to 8 bytes
      g000003-000002.journal   every segment's first record is its GENERATION

This module has the lock and the list of segments; one segment is in `ps/shard/journal/segments.py`. It knows neither
the content of a push nor when it is applied.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import JournalError
from shardkeep.base.files import atomic_write, owner_lock, sync_folder
from shardkeep.ps.shard.journal.format import EMPTY, SEGMENT_HEAD, Entry, Parts, Record, record_parts
from shardkeep.ps.shard.journal.segments import OpenSegment, Segment, failing, segments_in
from shardkeep.ps.shard.journal.write_behind import WriteBehind

__all__ = ["EMPTY", "Entry", "Journal", "Record"]

_BASE = "base"
GIVEN_UP = 2**62
"""The base of a log that was given up because of its size."""


class Journal:
    """A server's log. One process at a time may have it open; its threads may share it.

    Never appends to a segment of an earlier process. All methods raise JournalError if the disk fails."""

    def __init__(
        self,
        folder: Path,
        *,
        sync: bool,
        segment_bytes: int = 64 << 20,
        lock_s: float = 10.0,
        limit_bytes: int | None = None,
        on_given_up: Callable[[int], None] = lambda _size: None,
    ) -> None:
        """Creates the folder and takes its lock.

        `sync`: sync every record to disk, so that it survives a machine failure; else it survives only the process.
        `segment_bytes`: size at which the next record starts another segment. Blocks up to `lock_s` seconds while
        another process holds the lock, then raises JournalError with its pid. `limit_bytes`: size of all segments above
        which the log is given up: it is deleted and takes no records any more; None = no limit. `on_given_up`: called
        then, with the size."""
        self._folder, self._sync, self._segment_bytes = folder, sync, segment_bytes
        self._limit_bytes, self._on_given_up = limit_bytes, on_given_up
        self._given_up = False
        self._guard = threading.RLock()
        self._open: OpenSegment | None = None
        self._behind = WriteBehind()
        with failing(folder, "cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _take_lock(folder, lock_s)
            self._segments = segments_in(folder)
        self._replayed = not self._segments

    def replay(self) -> Iterator[Record]:
        """Yields all records, oldest first. Cuts off, on disk, a record that a crash left torn at the end of the log.

        Raises JournalError with file and byte if anything else is damaged."""
        with self._guard:
            segments = list(self._segments)
            torn = None if self._open or not segments else segments[-1]
        for segment in segments:
            yield from segment.records(self._cut if segment is torn else None)
        self._replayed = True

    def begin(self, generation: int, *, step: int, facts: Mapping[str, Any]) -> None:
        """Starts a segment of a generation, not lower than the last. Its first record is GENERATION with `step`.

        `facts` (JSON types): the record's body. If the caller has not replayed the log, this call does and discards
        the records."""
        if not self._replayed:  # a torn record may only be in the last segment
            deque(self.replay(), maxlen=0)
        body = np.frombuffer(json.dumps(dict(facts)).encode("utf-8"), dtype=np.uint8)
        with self._guard:
            self._start(generation, record_parts(Entry.GENERATION, 0, step, body))

    def append(self, entry: Entry, *, rank: int, step: int, body: npt.NDArray[np.uint8] = EMPTY) -> None:
        """Adds a record. On return it survives the process, and with `sync` a machine failure.

        `body`: C-contiguous and not copied; do not change it during the call. Raises JournalError; the journal is then
        unchanged and usable."""
        if self._given_up:
            return
        parts = record_parts(entry, rank, step, body)
        with self._guard:
            if self._opened().segment.size >= self._segment_bytes and self._opened().segment.highest >= 0:
                self.roll()
                if self._limit_bytes is not None and (size := self.size_bytes) > self._limit_bytes:
                    self._give_up(size)
                    return
            opened = self._opened()
            with failing(opened.segment.path, "cannot be written"):
                opened.write(parts)
            opened.segment.highest = max(opened.segment.highest, step)

    def roll(self) -> None:
        """Closes the open segment and starts the next, with the same GENERATION record. A log that was given up takes
        records again: they build on the checkpoint that the caller takes."""
        with self._guard:
            self._given_up = False
            opened = self._opened()
            self._start(opened.segment.generation, opened.start)

    def _give_up(self, size: int) -> None:
        """Deletes what it has, except the open segment, which stays empty."""
        self._given_up = True
        self.build_on(GIVEN_UP)
        for segment in self._segments[:-1]:
            self._delete(segment)
        self._on_given_up(size)

    def to_disk(self) -> None:
        """Syncs all records to disk, so that they survive a machine failure."""
        with self._guard:
            for segment in self._segments:
                with failing(segment.path, "cannot be brought to disk"), segment.path.open("rb") as file:
                    os.fsync(file.fileno())
            with failing(self._folder, "cannot be brought to disk"):
                sync_folder(self._folder)

    def forget_before(self, step: int) -> None:
        """Deletes segments whose records are all of steps below `step`, except the newest segment."""
        with self._guard:
            if self.base == GIVEN_UP and not self._given_up:
                self.build_on(step)
            doomed = [s for s in self._segments[:-1] if self._replayed and s.highest < step]
            if doomed:
                self.build_on(max(self.base, 1 + max(segment.highest for segment in doomed)))
            for segment in doomed:
                self._delete(segment)

    @property
    def base(self) -> int:
        """The step of the earliest checkpoint on which the records build; 0 = they need none."""
        try:
            return int((self._folder / _BASE).read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise JournalError(f"{self._folder / _BASE}: cannot be read ({error})") from error

    def build_on(self, step: int) -> None:
        """Records that the log builds on the checkpoint of `step`."""
        with self._guard, failing(self._folder / _BASE, "cannot be written"):
            if step != self.base:
                self._check_lock()
                atomic_write(self._folder / _BASE, f"{step}\n")

    def clear(self) -> None:
        """Deletes all segments, because the job starts again from step 0."""
        with self._guard:
            self._shut()
            for segment in reversed(self._segments):  # a crash in between leaves a valid earlier state
                self._delete(segment)
            self.build_on(0)
            self._replayed, self._given_up = True, False
            self._sync_folder()

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        with self._guard:
            return sum(segment.size for segment in self._segments)

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        with self._guard:
            self._shut()
            self._behind.close()
            if self._lock is not None:
                os.close(self._lock)
            self._lock = None

    def _opened(self) -> OpenSegment:
        if self._open is None:
            raise JournalError(f"{self._folder}: no segment is open; call begin() first")
        return self._open

    def _check_lock(self) -> None:
        if self._lock is None:
            raise JournalError(f"{self._folder}: the journal is closed")

    def _start(self, generation: int, start: Parts) -> None:
        """Creates a segment with its first record, whole or not at all. On failure, the segment before stays open."""
        self._check_lock()
        last = self._segments[-1] if self._segments else None
        if last is not None and generation < last.generation:
            raise JournalError(f"{self._folder}: holds generation {last.generation}; {generation} cannot follow it")
        number = last.number + 1 if last is not None and last.generation == generation else 1
        path = self._folder / f"g{generation:06d}-{number:06d}.journal"
        with failing(path, "cannot be written"):
            if self._open is not None:
                self._open.mend()
            segment = Segment(path, generation, number, 0)
            opened = OpenSegment(segment, start, sync=self._sync, behind=self._behind)
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
            opened.close()

    def _delete(self, segment: Segment) -> None:
        self._check_lock()
        with failing(segment.path, "cannot be deleted"):
            segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)

    def _sync_folder(self) -> None:
        if self._sync:
            sync_folder(self._folder)

    def _cut(self, segment: Segment, size: int) -> None:
        """Truncates a segment to `size` bytes of whole records. Deletes it if no record is left."""
        with self._guard, failing(segment.path, "cannot be cut"):
            self._check_lock()
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
        raise JournalError(f"{folder}: {error}; end that process first: two cannot write the same journal") from error
    except OSError as error:
        raise JournalError(
            f"{folder / 'lock'}: cannot be locked ({error.strerror or error}), and without a lock two processes could "
            "write the same journal; use a local disk, or NFS with locks"
        ) from error
