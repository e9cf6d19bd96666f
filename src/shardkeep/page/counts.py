"""Counts of a run's processes: the newest telemetry of each, and a bounded part of what was before."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardkeep.compression.ledger import DIRECTIONS as LEDGER_DIRECTIONS
from shardkeep.page.series import Series
from shardkeep.records.record import added, numbers
from shardkeep.records.telemetry import ServerTelemetry, Telemetry, WorkerTelemetry

Key = tuple[str, int]
Bytes = dict[str, dict[str, float]]
GROWTH_S, GROWTH_EVERY_S = 600.0, 5.0
"""Seconds of the window over which the growth of tables is measured."""
STEPS_S = 30.0
"""Seconds over which the times of a step are averaged."""
DIRECTIONS = ("pull", "push", "tower")


class TelemetryCounts:
    """What telemetry says. Not thread safe."""

    def __init__(self) -> None:
        self.newest: dict[Key, Telemetry] = {}
        """The newest record of each process."""
        self.steps: dict[int, deque[WorkerTelemetry]] = {}
        """The records of each worker with times of steps, over the last seconds. The newest one stays."""
        self.rows: deque[tuple[float, int, dict[str, int]]] = deque()
        """Time, servers that have reported, and rows by table, over the last minutes."""
        self.spent = Series()
        """position, bytes of training so far, as the workers' records have them."""
        self._before: dict[Key, Bytes] = {}
        """The counts of processes that died."""

    @property
    def workers(self) -> list[WorkerTelemetry]:
        """The newest record of each worker, in order."""
        return [one for _, one in sorted(self.newest.items()) if isinstance(one, WorkerTelemetry)]

    @property
    def servers(self) -> list[ServerTelemetry]:
        """The newest record of each server, in order."""
        return [one for _, one in sorted(self.newest.items()) if isinstance(one, ServerTelemetry)]

    @property
    def bytes_by_part(self) -> Bytes:
        """Bytes of all workers by direction and part, of dead processes too."""
        return functools.reduce(added, [*map(_bytes, self.workers), *self._before.values()], {})

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, over all servers."""
        rows: dict[str, int] = {}
        for record in self.servers:
            for table in record.tables:
                rows[table.name] = rows.get(table.name, 0) + int(table.rows or 0)
        return rows

    def take(self, record: Telemetry) -> None:
        """Takes the next record."""
        last, at = self.newest.get(record.place), record.at or 0.0
        if isinstance(last, WorkerTelemetry) and last.pid != record.pid:
            self._before[record.place] = added(self._before.get(record.place, {}), _bytes(last))
        if isinstance(record, WorkerTelemetry):
            if isinstance(last, WorkerTelemetry) and last.pid == record.pid and record.steps == 0:  # no step since
                record = replace(record, step_ms=last.step_ms, wait_ms=last.wait_ms)
            self._take_steps(record, at)
        self.newest[record.place] = record
        if isinstance(record, WorkerTelemetry) and record.index == 0:
            position = record.step if record.samples is None else record.samples
            if position is not None:
                spent = self.bytes_by_part
                self.spent.add((position, sum(sum(spent.get(name, {}).values()) for name in DIRECTIONS)))
        if isinstance(record, ServerTelemetry) and (not self.rows or at - self.rows[-1][0] >= GROWTH_EVERY_S):
            self.rows.append((at, len(self.servers), self.table_rows))
            while self.rows[0][0] < at - GROWTH_S:
                self.rows.popleft()

    def _take_steps(self, record: WorkerTelemetry, at: float) -> None:
        if not record.step_ms:
            return
        seen = self.steps.setdefault(record.index, deque())
        if seen and seen[-1].pid != record.pid:
            seen.clear()
        seen.append(record)
        while (seen[0].at or 0.0) < at - STEPS_S:
            seen.popleft()


def _bytes(record: WorkerTelemetry) -> Bytes:
    """The bytes of a telemetry record by direction and part; `fp32` = what fp32 would have sent."""
    told: dict[str, Any] = {way: record.bytes[way] for way in LEDGER_DIRECTIONS if way in record.bytes}
    told["fp32"] = record.fp32_bytes
    found = {way: numbers(parts if isinstance(parts, Mapping) else {"": parts}) for way, parts in told.items()}
    return {way: parts for way, parts in found.items() if parts}
