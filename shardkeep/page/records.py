"""Records of a run: reads what a job adds to its run folder, and keeps a bounded part of it. Writes nothing."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shardkeep.base.errors import UserError
from shardkeep.page.series import Series
from shardkeep.run.reader import MetricsTail, RunReader

Record = dict[str, Any]
Key = tuple[str, int]
EVENTS_KEPT = 2000
LOSSES_KEPT = 400
MOST_TELEMETRY_BYTES = 8 << 20
"""Of a long run only the last telemetry is read."""
GROWTH_S, GROWTH_EVERY_S = 600.0, 5.0
"""Seconds of the window over which the growth of tables is measured."""
STEPS_S = 30.0
"""Seconds over which the times of a step are averaged."""
ROLES = ("coordinator", "server", "worker")
DIRECTIONS = ("pull", "push", "tower")


class RunRecords:
    """The records of one run folder. Not thread safe."""

    def __init__(self, path: str | Path) -> None:
        self.reader = RunReader(path)
        self.summary: Record | None = None
        self.members: list[Record] = []
        self.training = Series()
        """time, step, samples, loss, samples per second, steps per second."""
        self.evaluations: list[Record] = []
        self.events: deque[Record] = deque(maxlen=EVENTS_KEPT)
        self.progress: Record = {}
        self.losses: deque[tuple[int, float | None]] = deque(maxlen=LOSSES_KEPT)
        """Step and loss of the last records; None = not finite."""
        self.telemetry: dict[Key, Record] = {}
        """The newest record of each process."""
        self.steps_seen: dict[int, deque[Record]] = {}
        """The records of each worker with times of steps, over the last seconds. The newest one stays."""
        self.rows_seen: deque[tuple[float, int, dict[str, int]]] = deque()
        """Time, servers that have reported, and rows by table, over the last minutes."""
        self.spent = Series()
        """position, bytes of training so far, as the workers' records have them."""
        self.newest = 0.0
        """Time of the newest record, in seconds since 1970."""
        self.first: float | None = None
        self._before: dict[Key, dict[str, float]] = {}
        """The counts of processes that died."""
        self._trained: dict[Key, float] = {}
        """Bytes of training of each worker."""
        self._metrics = MetricsTail(self.reader.metrics_path)
        self._telemetry = MetricsTail(self.reader.telemetry_path, most_bytes=MOST_TELEMETRY_BYTES)

    def refresh(self) -> None:
        """Reads what the job has added since the last call."""
        for record in self._metrics:
            if isinstance(record, dict):
                self._take(record)
        restarts = self._telemetry.restarts
        for record in self._telemetry:
            if isinstance(record, dict) and record.get("role") in ROLES:
                self._count(record, again=self._telemetry.restarts > restarts)
        with contextlib.suppress(UserError, OSError):
            self.summary = self.reader.summary()
        with contextlib.suppress(UserError, OSError):
            self.members = [member for member in self.reader.member_list() if isinstance(member, dict)]

    def role(self, role: str) -> Iterator[tuple[int, Record]]:
        """Index and newest telemetry of each process of a role, in order."""
        for (name, index), record in sorted(self.telemetry.items()):
            if name == role:
                yield index, record

    @property
    def bytes_by_part(self) -> dict[str, dict[str, float]]:
        """Bytes of all workers by direction and part, of dead processes too."""
        total: dict[str, dict[str, float]] = {}
        for index, record in self.role("worker"):
            for counts in (flat_bytes(record), self._before.get(("worker", index), {})):
                for name, count in counts.items():
                    direction, _, part = name.partition("/")
                    parts = total.setdefault(direction, {})
                    parts[part] = parts.get(part, 0) + count
        return total

    def _take(self, record: Record) -> None:
        time = self._seen(record)
        kind = record.get("kind")
        if kind == "progress":
            self.progress = record
            step, loss = int(number(record.get("step")) or 0), number(record.get("loss"))
            if "loss" in record:  # the loop of a user may report none
                self.losses.append((step, loss))
            samples, rate = number(record.get("samples")), number(record.get("samples_per_s"))
            self.training.add((time, step, samples, loss, rate, steps_per_s(record)))
        elif kind == "eval":
            self.evaluations.append({**record, "at": time})
        else:
            self.events.append({**record, "at": time})

    def _count(self, record: Record, *, again: bool) -> None:
        """`again`: the file has been written again, and this may be the time before a record that has been counted."""
        time = self._seen(record)
        key = str(record.get("role", "")), int(number(record.get("index")) or 0)
        last = self.telemetry.get(key)
        if again and last is not None and time <= last["at"]:
            return
        if last is not None and last.get("pid") != record.get("pid"):
            counts = self._before.setdefault(key, {})
            for name, count in flat_bytes(last).items():
                counts[name] = counts.get(name, 0) + count
        if last is not None and last.get("pid") == record.get("pid") and record.get("steps") == 0:
            record = record | {name: last[name] for name in ("step_ms", "wait_ms") if name in last}  # no step since
        self.telemetry[key] = {**record, "at": time}
        if key[0] == "worker":
            self._trained[key] = trained_bytes(record)
            self._count_steps(key[1], self.telemetry[key])
        if key == ("worker", 0) and (at := position(record.get("samples"), record.get("step"))) is not None:
            dead = sum(count for counts in self._before.values() for name, count in counts.items() if is_trained(name))
            self.spent.add((at, dead + sum(self._trained.values())))
        if key[0] == "server" and (not self.rows_seen or time - self.rows_seen[-1][0] >= GROWTH_EVERY_S):
            self.rows_seen.append((time, sum(role == "server" for role, _ in self.telemetry), table_rows(self)))
            while self.rows_seen[0][0] < time - GROWTH_S:
                self.rows_seen.popleft()

    def _count_steps(self, index: int, record: Record) -> None:
        if not record.get("step_ms"):
            return
        seen = self.steps_seen.setdefault(index, deque())
        if seen and seen[-1].get("pid") != record.get("pid"):
            seen.clear()
        seen.append(record)
        while seen[0]["at"] < record["at"] - STEPS_S:
            seen.popleft()

    def _seen(self, record: Mapping[str, Any]) -> float:
        time = seconds_of(record.get("time")) or self.newest
        self.newest = max(self.newest, time)
        self.first = time if self.first is None else self.first
        return time


def table_rows(records: RunRecords) -> dict[str, int]:
    """Rows of each table, over all servers."""
    rows: dict[str, int] = {}
    for _, record in records.role("server"):
        for table in record.get("tables") or ():
            rows[str(table.get("name"))] = rows.get(str(table.get("name")), 0) + int(number(table.get("rows")) or 0)
    return rows


def flat_bytes(record: Mapping[str, Any]) -> dict[str, float]:
    """The bytes of a telemetry record as `direction/part`; `fp32/direction` = what fp32 would have sent."""
    counts: dict[str, float] = {}
    for direction, parts in (record.get("bytes") or {}).items():
        if isinstance(parts, Mapping):
            counts |= {f"{direction}/{part}": number(count) or 0 for part, count in parts.items()}
        elif direction == "control":
            counts["control/"] = number(parts) or 0
    return counts | {f"fp32/{name}": number(n) or 0 for name, n in (record.get("fp32_bytes") or {}).items()}


def steps_per_s(record: Mapping[str, Any]) -> float | None:
    """Steps a second, by the mean step of a record."""
    total_ms = number((record.get("step_ms") or {}).get("total"))
    return round(1e3 / total_ms, 3) if total_ms else None


def position(samples: Any, step: Any) -> float | int | None:
    """How far training is: in samples, or in steps where nobody says the samples."""
    found = number(samples)
    return number(step) if found is None else found


def trained_bytes(record: Mapping[str, Any]) -> float:
    """The bytes of training in a telemetry record."""
    counts = record.get("bytes") or {}
    return sum(number(count) or 0 for direction in DIRECTIONS for count in (counts.get(direction) or {}).values())


def is_trained(name: str) -> bool:
    """Whether a name of `flat_bytes` is one of training."""
    return name.partition("/")[0] in DIRECTIONS


def number(value: Any) -> float | int | None:
    """`value` where it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def seconds_of(text: Any) -> float | None:
    """Seconds since 1970 of a local time as records have it; None = it is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None
