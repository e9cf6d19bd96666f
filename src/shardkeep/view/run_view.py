"""RunView: what is known of one job now, for all that show a job. It hears its records; it reads and writes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

from shardkeep.ps.control.records import JobStatus, MemberStatus
from shardkeep.records.events import CheckpointEvent, Event, FormedTable, ProgressiveEvent, RecoveryEvent, event_of
from shardkeep.records.lines import from_the_end, newest_of_each
from shardkeep.records.record import Json, Record
from shardkeep.records.telemetry import Telemetry, near_memory_limit, telemetry_of
from shardkeep.records.training import Evaluation, Progress, Scores
from shardkeep.workers.config import UNWEIGHTED, is_of_ranks

RECENT_S = 300.0
"""Seconds of a job whose mean step tells the time left."""
METRICS: Mapping[str, str] = {
    "auc": "AUC", "gauc": "GAUC", "logloss": "logloss", "normalized_entropy": "normalized entropy",
    "calibration": "calibration", f"{UNWEIGHTED}calibration": "unweighted calibration", "accuracy": "accuracy",
    "precision": "precision", "recall": "recall", "mse": "MSE", "rmse": "RMSE", "mae": "MAE", "r2": "R2",
}  # fmt: skip
"""How metrics are called, in the order in which people see them."""


class RunView:
    """What is known of a job. `hear` takes its records in order; `of` makes one of what is there."""

    def __init__(self) -> None:
        self.state = "starting"
        self.progress = Progress()
        self.evaluation: Evaluation | None = None
        self.checkpoints: list[CheckpointEvent] = []
        """The last that is complete, and what was said of one since then last."""
        self.period_steps: int | None = None
        """Steps between two checkpoints, where the job chose them."""
        self.recoveries: list[RecoveryEvent] = []
        self.tables: tuple[FormedTable, ...] = ()
        self.journal: str | None = None
        """What the servers' journals survive."""
        self.members: Sequence[MemberStatus] = ()
        """As the coordinator sees them."""
        self.telemetry: Sequence[Telemetry] = ()
        """The newest record of each process."""
        self._recent: deque[tuple[int, float]] = deque()
        self._scores: list[tuple[type[Scores], str, float]] = []

    @classmethod
    def of(cls, run: Path | None, status: JobStatus | None = None) -> Self:
        """The view of a job by its coordinator's answer, or else by the ends of the files in its folder.

        The time left follows from the folder's files in any case."""
        view = cls()
        found = [] if run is None else [*from_the_end(run / "metrics.jsonl")][::-1]
        if status is None:
            view.hear(*found)
            view.telemetry = [] if run is None else newest_of_each(run / "telemetry.jsonl")
            return view
        view.hear(*(record for record in found if isinstance(record, Progress)))
        view.progress, view.members = Progress.of(status.progress), status.members
        view.evaluation = Evaluation.of(status.evaluation) if status.evaluation else None
        for event in status.events:
            view._happened(event_of(event))
        view.state = status.state
        view.telemetry = [telemetry_of(record) for record in status.telemetry]
        return view

    def hear(self, *records: Record) -> None:
        """Takes records of metrics.jsonl, in order."""
        for record in records:
            if isinstance(record, Progress):
                self.progress = record
                self.state = "training" if self.state == "starting" else self.state
                self._pace(record)
            elif isinstance(record, Evaluation):
                self.evaluation = record
            elif isinstance(record, Event):
                self._happened(record)
            if isinstance(record, Scores):
                self._scored(record)

    @property
    def checkpoint(self) -> CheckpointEvent | None:
        """The last checkpoint that is complete."""
        return next((one for one in reversed(self.checkpoints) if one.bytes is not None), None)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step over the last minutes, with evaluations and checkpoints; None = not known."""
        if len(self._recent) < 2:
            return None
        (first, began_s), (last, ended_s) = self._recent[0], self._recent[-1]
        return (ended_s - began_s) / (last - first) if last > first and ended_s > began_s else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step; None = not known. Early stopping may end a job sooner.

        Before there are two records of progress it follows from their rate, without evaluations."""
        now, step_s = self.progress, self.step_s
        if step_s is None and now.step and now.samples and now.samples_per_s:
            step_s = now.samples / now.step / now.samples_per_s
        return float(max(0, now.total_steps - now.step) * step_s) if step_s and now.step and now.total_steps else None

    @property
    def trend(self) -> str:
        """The last evaluation and its change: `AUC 0.7812 (+0.0031)`. Empty before the first one.

        It shows the first of `METRICS` that evaluations have, of the first label if there are several, or the first one
        of a retrieval model. A job without evaluation shows that of progressive validation."""
        if not self._scores:
            return ""
        (_, _, first), (_, name, last) = self._scores[0], self._scores[-1]
        metric, slash, label = name.partition("/")
        change = f" ({last - first:+.4f})" if len(self._scores) > 1 else ""
        return f"{METRICS.get(metric, metric)}{slash}{label} {last:.4f}{change}"

    @property
    def memory_warnings(self) -> list[str]:
        """A line for each process near its memory limit."""
        near = near_memory_limit(sorted(self.telemetry, key=lambda record: record.place))
        return [f"{name} uses {100 * share:.0f} % of its memory limit" for name, share in near]

    def _happened(self, event: Event) -> None:
        if isinstance(event, CheckpointEvent):
            self.period_steps = self.period_steps if event.every_steps is None else event.every_steps
            self.checkpoints = [*[one for one in self.checkpoints if one.bytes is not None][-1:], event]
        elif isinstance(event, RecoveryEvent):
            self.recoveries.append(event)
            self.state = "training"
        elif event.formed:
            self.tables, self.journal, self.state = event.tables, event.journal, "training"
        elif event.phase in ("recovering", "stopping"):
            self.state = event.phase
        elif event.lost is not None and self.state != "stopping":
            self.state = "recovering"

    def _pace(self, progress: Progress) -> None:
        if progress.step is None or progress.at is None:
            return
        if self._recent and progress.step < self._recent[-1][0]:  # the job went back
            self._recent.clear()
        self._recent.append((progress.step, progress.at))
        while self._recent[0][1] < progress.at - RECENT_S:
            self._recent.popleft()

    def _scored(self, scores: Scores) -> None:
        """Keeps the last two values of the metric that is shown; an AUC of one class has none."""
        if isinstance(scores, ProgressiveEvent) and self.evaluation is not None:
            return
        name = next((key for metric in METRICS for key in scores.others if key.partition("/")[0] == metric), "")
        name = name or next(filter(is_of_ranks, scores.others), "")
        if name in scores.metrics:
            same = [value for kind, key, value in self._scores[-1:] if (kind, key) == (type(scores), name)]
            self._scores = [(type(scores), name, value) for value in (*same, scores.metrics[name])]


def age_s(record: Record) -> float | None:
    """Seconds since a record was made, by this machine's clock; None = it does not say when."""
    return None if record.at is None else max(0.0, time.time() - record.at)


def ended_text(summary: Json) -> str:
    """`stopped at step 120: Ctrl-C or SIGTERM`, or `failed: ...`. The message of a stopped job says that it stopped."""
    status, message = str(summary["status"]), str(summary.get("message") or "")
    return message if message and status == "stopped" else f"{status}{': ' + message if message else ''}"


def step_text(progress: Progress) -> str:
    """`1,200/5,000`; only the first number where nobody knows the last step, as in a loop of the user's own."""
    total = progress.total_steps
    return f"{progress.step or 0:,}" + ("" if total is None else f"/{total:,}")


def speed_text(progress: Progress) -> str | None:
    """`2,133 samples/s`, or steps a second where nobody knows the samples; None = neither is known."""
    if (rate := progress.samples_per_s) is not None or progress.total_steps is not None:
        return f"{rate or 0:,.0f} samples/s"
    return f"{progress.steps_per_s:,.1f} steps/s" if progress.steps_per_s else None


def clock_text(seconds: float) -> str:
    """`0:01:02`."""
    return str(timedelta(seconds=round(seconds)))
