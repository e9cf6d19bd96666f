"""Reads the files of records, metrics.jsonl and telemetry.jsonl: what was added, the newest records. Writes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from shardkeep.records.events import event_of
from shardkeep.records.record import Json, Record
from shardkeep.records.telemetry import ROLES, Telemetry, telemetry_of
from shardkeep.records.training import Evaluation, Progress

R = TypeVar("R", bound=Record)
TAIL_BYTES = 1 << 20
"""Has a telemetry record of each of some hundred processes."""
_KINDS = {"progress": Progress.of, "eval": Evaluation.of, "telemetry": telemetry_of}


def record_of(found: Json) -> Record:
    """The record of a JSON object; its keys of a kind that is not known are an event's."""
    return _KINDS.get(str(found.get("kind")), event_of)(found)


def parsed(line: bytes, read: Callable[[Json], R]) -> R | None:
    """The record in a line; None = it has none, because it was cut off."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return read(found) if isinstance(found, dict) else None
    return None


def earlier(path: Path) -> Path:
    """The generation before a file, which it becomes when it is full."""
    return path.with_suffix(f".1{path.suffix}")


def from_the_end(path: Path, *, most_bytes: int = TAIL_BYTES) -> Iterator[Record]:
    """Yields the records near the end of a file, the last one first, those of its earlier generation after them."""
    for each in (path, earlier(path)):
        with contextlib.suppress(FileNotFoundError), each.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            for line in reversed(file.read(size).splitlines()):  # a device has no size, and maybe no end
                if (record := parsed(line, record_of)) is not None:
                    yield record
            most_bytes -= min(size, most_bytes)


def newest(path: Path, kind: type[R]) -> R | None:
    """The last record of a class near the end of a file; None = there is none."""
    return next((record for record in from_the_end(path) if isinstance(record, kind)), None)


def newest_of_each(path: Path) -> list[Telemetry]:
    """The last record of each process in a telemetry.jsonl: coordinator, servers, workers, each by index."""
    found: dict[tuple[str, int], Telemetry] = {}
    for record in from_the_end(path):
        if isinstance(record, Telemetry) and record.role in ROLES:
            found.setdefault(record.place, record)
    return [found[place] for place in sorted(found, key=lambda place: (ROLES.index(place[0]), place[1]))]


class Tail:
    """Reads what was added to a file of records since the last look; a half-written line waits for its end.

    The first look begins with the earlier generation of the file, if there is one. A file that has become the earlier
    generation meanwhile is read to its end first."""

    def __init__(self, path: Path, *, from_end: bool = False, most_bytes: int | None = None) -> None:
        """`from_end`: what is there already has been read. `most_bytes`: of longer files, the first look reads so many
        bytes at their end."""
        self._path, self._most_bytes = path, most_bytes
        self._position = 0
        self._last: bytes | None = None
        """The last line that was read; None = nobody has looked."""
        if from_end:
            self._added()

    def __iter__(self) -> Iterator[Record]:
        for line in self._added().splitlines():
            if (record := parsed(line, record_of)) is not None:  # else a coordinator was killed while it wrote the line
                yield record

    def _added(self) -> bytes:
        """The whole lines that nobody has read."""
        first = self._last is None
        if not first and self._has_last(self._path):
            return self._rest(self._path)
        if first or not self._has_last(before := earlier(self._path)):
            self._position, before = 0, earlier(self._path)
        lines = self._rest(before)
        self._position = 0
        lines += self._rest(self._path)
        return lines[-self._most_bytes :] if first and self._most_bytes else lines  # the first may be cut: no JSON then

    def _has_last(self, path: Path) -> bool:
        """Whether a file has the last line where it was read."""
        last = self._last or b""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, self._position - len(last)))
            return file.read(len(last)) == last
        return False

    def _rest(self, path: Path) -> bytes:
        whole = b""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            size = file.seek(0, 2)
            added = file.read(size - file.seek(min(size, self._position)))
            whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :] or self._last or b""
        return whole
