"""The file of telemetry records: appends a record per line, and keeps the file below a size for a job of any length.

When the file is almost full, a thread writes it again. Its newest quarter stays as it is. Before that, records of a
process are merged until each covers a longer time and half of the file is free. The last record of each process
that died stays, for its counts. One process appends; any number may read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardkeep.base.files import atomic_writer, forget_unfinished
from shardkeep.base.log import EventLog
from shardkeep.run.json_files import to_json
from shardkeep.run.merged_records import merged, number, requests_of

Record = Mapping[str, Any]
MOST_BYTES = 64_000_000
RECENT = 1 / 4
"""Share of the size that stays as it is."""
FREE = 1 / 2
"""Share of the size that is free afterwards."""
ALMOST = 7 / 8
"""Share of the size from which the file is written again; the rest takes records meanwhile."""
RETRY_S = 60.0
"""Seconds to the next attempt after one that failed."""
LONGEST_S = 30 * 86400.0
"""Seconds that a record covers at most; after that, the oldest records are dropped."""
_log = EventLog("run")


class TelemetryFile:
    """Appends records to one file. Thread safe.

    Args:
        path: The file; need not exist.
        most_bytes: Its size is never above.
    """

    def __init__(
        self, path: Path, *, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._most_bytes, self._clock = path, most_bytes, clock
        self._lock = threading.Lock()
        self._opened = False
        self._torn = False
        """Whether the file may end in the middle of a line."""
        self._rewriting: threading.Thread | None = None
        self._retry_s = float("-inf")

    def append(self, record: Record) -> None:
        """Appends a record. If that fails, the record is lost; the first failure is logged."""
        line = (to_json(record, compact=True) + "\n").encode()
        with self._lock:
            try:
                self._open()
                self._append(line)
            except OSError as error:
                self._torn = True
                self._warn("is not written", error)

    def settle(self) -> None:
        """Blocks until the file is not being written again. A process that ends waits as well."""
        thread = self._rewriting
        if thread is not None:
            thread.join()

    def _open(self) -> None:
        """Deletes what a process that was killed has left, once."""
        if self._opened:
            return
        forget_unfinished(self._path)
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size:
                file.seek(-1, os.SEEK_END)
                self._torn = file.read(1) != b"\n"
        self._opened = True

    def _append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            line = b"\n" + line if self._torn else line
            size = file.tell() + len(line)
            if size <= self._most_bytes:
                file.write(line)
        if size <= self._most_bytes:
            self._torn = False
        else:
            _log.warning(
                f"{self._path}: is full: records are lost until it is written again", once=f"{self._path} full"
            )
        if size > ALMOST * self._most_bytes and self._clock() >= self._retry_s and not self._is_rewriting():
            self._rewriting = threading.Thread(target=self._rewrite, name="telemetry file")
            self._rewriting.start()

    def _is_rewriting(self) -> bool:
        return self._rewriting is not None and self._rewriting.is_alive()

    def _rewrite(self) -> None:
        """Writes the file again, beside records that are appended. Readers see the old file or the new one."""
        try:
            with (
                contextlib.ExitStack() as until_renamed,
                atomic_writer(self._path) as target,
                self._path.open("rb") as source,
            ):
                recent = _begin_of_line(source, os.fstat(source.fileno()).st_size - int(RECENT * self._most_bytes))
                _write_older(source, recent, target, most_bytes=int((1 - FREE - RECENT) * self._most_bytes))
                source.seek(recent)
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())  # nobody waits for the disk yet
                until_renamed.enter_context(self._lock)
                shutil.copyfileobj(source, target)
                if target.tell() > ALMOST * self._most_bytes:  # single records fill it
                    self._retry_s = self._clock() + RETRY_S
        except OSError as error:
            self._retry_s = self._clock() + RETRY_S
            self._warn("cannot be made smaller", error)

    def _warn(self, what: str, error: OSError) -> None:
        text = f"{self._path}: telemetry {what} ({error.strerror or error})"
        _log.warning(text, once=f"{self._path} {what}")


@dataclass(slots=True)
class _Waiting:
    """A record that the next one of its process is merged with. `line` is as it was read; None = it is merged."""

    record: dict[str, Any]
    line: bytes | None

    def text(self) -> bytes:
        if self.line is not None:
            return self.line
        return (json.dumps(self.record, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def thinned(lines: Iterable[bytes], span_s: float) -> Iterator[bytes]:
    """Merges the records of each process until each covers `span_s` seconds or more; yields them as lines.

    A process's last record covers less, if it must. Drops lines that are no records."""
    waiting: dict[tuple[Any, Any], _Waiting] = {}
    requests: dict[tuple[Any, Any], tuple[Any, float]] = {}  # the pid, and its requests so far
    for line in lines:
        if (record := _record_of(line)) is None:
            continue
        place, pid = (str(record.get("role")), str(record.get("index"))), record.get("pid")
        newest, earlier = _Waiting(record, line), waiting.pop(place, None)
        if earlier is not None and earlier.record.get("pid") != pid:
            yield earlier.text()
        elif earlier is not None:
            owner, before = requests.get(place, (pid, 0.0))
            newest = _Waiting(merged(earlier.record, record, requests_before=before if owner == pid else 0.0), None)
        if number(newest.record.get("every_s")) < span_s:
            waiting[place] = newest
        else:
            requests[place] = pid, requests_of(record)
            yield newest.text()
    for last in waiting.values():
        yield last.text()


def _write_older(source: BinaryIO, end: int, target: BinaryIO, *, most_bytes: int) -> None:
    """Writes what `source` has before `end`, in at most `most_bytes`."""
    span_s, dropped = _first_span_s(source, end), 0
    while True:
        target.seek(0)
        target.truncate()
        skipped = 0
        for line in thinned(_lines(source, end), span_s):
            if skipped < dropped:
                skipped += len(line)
            else:
                target.write(line)
        if (size := target.tell()) <= most_bytes:
            return
        if span_s < LONGEST_S:
            span_s *= 2 ** max(1, int(math.log2(size / most_bytes)))
        else:  # almost all are last records of processes that died
            dropped = skipped + size - most_bytes


def _first_span_s(source: BinaryIO, end: int) -> float:
    """The span of the oldest records, which an earlier call has chosen, or twice that of the newest ones."""
    found = [number(record.get("every_s")) for line in _lines(source, end, most=1) if (record := _record_of(line))]
    source.seek(_begin_of_line(source, end - 1))
    newest = _record_of(source.readline()) or {}
    return max(*found, 2 * number(newest.get("every_s")), 0.001)


def _lines(source: BinaryIO, end: int, *, most: int | None = None) -> Iterator[bytes]:
    source.seek(0)
    count = 0
    while source.tell() < end and (most is None or count < most):
        count += 1
        yield source.readline()


def _begin_of_line(source: BinaryIO, position: int) -> int:
    """Where the line that has the byte at `position` begins."""
    begin = max(0, position)
    while begin > 0:
        part = min(begin, 1 << 16)
        source.seek(begin - part)
        if (at := source.read(part).rfind(b"\n")) >= 0:
            return begin - part + at + 1
        begin -= part
    return 0


def _record_of(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None = it has none, for it was cut off."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
