"""Records of a run: reads what a job adds to its run folder, and keeps a bounded part of it. Writes nothing."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from shardkeep.base.errors import UserError
from shardkeep.page.counts import TelemetryCounts
from shardkeep.page.series import Series
from shardkeep.records.events import Event
from shardkeep.records.lines import Tail
from shardkeep.records.record import Record, number
from shardkeep.records.telemetry import ROLES, Telemetry
from shardkeep.records.training import Evaluation, Progress
from shardkeep.run.reader import RunReader
from shardkeep.view.run_view import RunView

Json = dict[str, Any]
R = TypeVar("R", bound=Record)
EVENTS_KEPT = 2000
LOSSES_KEPT = 400
MOST_TELEMETRY_BYTES = 8 << 20
"""Of a long run only the last telemetry is read."""


class RunRecords:
    """The records of one run folder. Not thread safe."""

    def __init__(self, path: str | Path) -> None:
        self.reader = RunReader(path)
        self.summary: Json | None = None
        self.view, self.counts = RunView(), TelemetryCounts()
        self.training = Series()
        """time, step, samples, loss, samples per second, steps per second."""
        self.evaluations: list[Evaluation] = []
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.losses: deque[tuple[int, float | None]] = deque(maxlen=LOSSES_KEPT)
        """Step and loss of the last records; None = not finite."""
        self.newest = 0.0
        """Time of the newest record, in seconds since 1970."""
        self.first: float | None = None
        self._metrics = Tail(self.reader.metrics_path)
        self._telemetry = Tail(self.reader.telemetry_path, most_bytes=MOST_TELEMETRY_BYTES)

    def refresh(self) -> None:
        """Reads what the job has added since the last call."""
        for record in self._metrics:
            self._take(self._timed(record))
        for record in self._telemetry:
            if isinstance(record, Telemetry) and record.role in ROLES:
                self.counts.take(self._timed(record))
        with contextlib.suppress(UserError, OSError):
            self.summary = self.reader.summary()

    def members(self) -> list[Json]:
        """The members of the current generation."""
        with contextlib.suppress(UserError, OSError):
            return [member for member in self.reader.member_list() if isinstance(member, dict)]
        return []

    def _take(self, record: Record) -> None:
        self.view.hear(record)
        if isinstance(record, Progress):
            step, rate = int(record.step or 0), record.samples_per_s
            if "loss" in record.keys:  # the loop of a user may report none
                self.losses.append((step, record.loss))
            self.training.add((record.at, step, record.samples, record.loss, rate, record.steps_per_s))
        elif isinstance(record, Evaluation):
            self.evaluations.append(record)
        elif isinstance(record, Event):
            self.events.append(record)

    def _timed(self, record: R) -> R:
        """The record, with the time of the one before where it has none."""
        if record.at is None:
            record = replace(record, time=datetime.fromtimestamp(self.newest).isoformat())
        self.newest = max(self.newest, record.at or 0.0)
        self.first = record.at if self.first is None else self.first
        return record


def position(samples: Any, step: Any) -> float | int | None:
    """How far training is: in samples, or in steps where nobody says the samples."""
    found = number(samples)
    return number(step) if found is None else found
