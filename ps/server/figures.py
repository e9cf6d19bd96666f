"""Figures of a server: what it counts, for telemetry records and exporters. Counts the time of its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.histogram import Histogram
from shardkeep.ps.control.telemetry import process_figures
from shardkeep.ps.server.service import ShardService

Record = dict[str, Any]
Handle = Callable[..., Future[Bytes]]


class RequestTimes:
    """Measures the work on each message. A pull that waits for other workers' pushes is not at work."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = Histogram()

    def timed(self, handle: Handle) -> Handle:
        """The handler of a service whose messages are measured."""

        def measured(*messages: Bytes) -> Future[Bytes]:
            began = self._clock()
            try:
                return handle(*messages)
            finally:
                seconds = self._clock() - began
                with self._lock:
                    self._seconds.add(seconds)

        return measured

    def figures(self) -> Record:
        """Number and seconds of all calls, and the number by seconds (`base/histogram.py`)."""
        with self._lock:
            seconds = self._seconds
            return {"requests": seconds.count, "request_s": seconds.sum_s, "request_histogram": seconds.figures()}


def figures_of(
    service: Callable[[], ShardService | None], times: RequestTimes, *, metrics: str | None = None
) -> Callable[[], Record]:
    """Returns the figures of one server since its process began: counts and seconds, as JSON types. Any thread may ask.

    `created` are the rows of the job so far, with those of the checkpoint that it began from; `removed` those that
    eviction took, `refused` the rows of pushes that admission dropped. `service`: None = there is none yet. `times`: of
    its requests. `metrics`: the address of the process's metrics; None = there is none."""

    def figures() -> Record:
        counts = {} if (shard := service()) is None else shard.figures()
        return {**counts, **times.figures(), **process_figures(), "metrics": metrics}

    return figures


_NOT_WHERE_ZERO = ("removed", "refused", "candidates")
"""Counts that tables without policies never have: they were two fifths of a record."""


def shard_record(now: Record, last: Record) -> Record:
    """The telemetry record of a server: the figures, and the mean of the requests since the last ones. Some counts of
    tables are left out where they are 0."""
    requests = now["requests"] - last["requests"]
    mean_ms = 1e3 * (now["request_s"] - last["request_s"]) / requests if requests else None
    kept = {key: value for key, value in now.items() if key not in ("requests", "request_s", "request_histogram")}
    if "tables" in kept:
        kept["tables"] = [_short(table) for table in kept["tables"]]
    return {**kept, "request_ms": None if mean_ms is None else round(mean_ms, 4)}


def _short(table: Record) -> Record:
    return {key: value for key, value in table.items() if value or key not in _NOT_WHERE_ZERO}
