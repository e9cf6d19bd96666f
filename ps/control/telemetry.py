"""Telemetry: the records that each process of a job makes of its figures every few seconds. Knows no figure itself.

Figures are counts since the process began, as a plain dict: any thread may ask for them at any time. A record has the
counts, and for some of them means over the seconds since the last record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from shardkeep.base.logs.local_time import time_of_day
from shardkeep.ps.control.records import Record

MOST_PER_S = 10
"""Records a second that the coordinator gets from all processes together."""


def record_interval_s(every_s: float, *, servers: int, workers: int) -> float:
    """Seconds between two records of one process, so that the coordinator gets at most MOST_PER_S; 0 = no records."""
    return max(every_s, (servers + workers) / MOST_PER_S) if every_s else 0.0


def process_figures() -> Record:
    """Memory of this process now, and the most that it may have."""
    from shardkeep.base.machine.limits import limit_bytes, rss_bytes  # a process without records needs neither

    return {"rss_bytes": rss_bytes(), "limit_bytes": limit_bytes()}


class TelemetryRecords:
    """Makes the records of one process. Has no thread: its owner calls `look` between two pieces of work.

    Args:
        every_s: Seconds between two records.
        figures: Returns the process's figures.
        record: Makes a record's content of the figures now and those of the last record.
        report: Sends a record; never blocks.
    """

    def __init__(
        self,
        every_s: float,
        *,
        figures: Callable[[], Record],
        record: Callable[[Record, Record], Record],
        report: Callable[[str, Record], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._clock = every_s, clock
        self._figures, self._record, self._report = figures, record, report
        self._last = figures()
        self._next = clock() + every_s

    @classmethod
    def every(cls, every_s: float, **parts: Any) -> TelemetryRecords | None:
        """None where `every_s` is 0: there are no records, and no part is called."""
        return cls(every_s, **parts) if every_s else None

    def look(self) -> None:
        """Sends a record if one is due."""
        if self._clock() >= self._next:
            self.send()

    def send(self) -> None:
        """Sends a record now."""
        now = self._figures()
        content = self._record(now, self._last)
        self._last, self._next = now, self._clock() + self._every_s
        self._report("telemetry", {"time": time_of_day(), "every_s": round(self._every_s, 3), **content})


def place_of_process(host: str) -> Record:
    """What tells a process from others: its pid, and where others reach it."""
    return {"pid": os.getpid(), "host": host}
