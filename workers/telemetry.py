"""Telemetry: what one worker counts while it trains."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shardkeep.workers.step import StepResult
from shardkeep.workers.step_counts import StepCounts
from shardkeep.workers.timing.clock import Stopwatch
from shardkeep.workers.timing.cpu_time import CpuTime
from shardkeep.workers.timing.pace import Pace


class Telemetry:
    """Samples, time, losses and dropped rows of one worker. Rates are of the watch's seconds of training.

    The step switches `watch`; telemetry only reads it."""

    def __init__(
        self,
        watch: Stopwatch,
        *,
        resumed: bool = False,
        cpu: CpuTime | None = None,
        counts: StepCounts | None = None,
    ) -> None:
        """`resumed`: the job began from a checkpoint. `counts`: counts the steps for telemetry records."""
        self.watch = watch
        self._counts = counts
        self.cpu = CpuTime() if cpu is None else cpu
        self.resumed = resumed
        self.samples = 0
        self.dropped_rows = 0
        self.skipped_steps = 0
        self._before: int | None = None  # samples of the steps before the first one here; None = not known yet
        self._losses: list[float] = []
        self._pace = Pace(watch)
        self._reported = self._pace.mark(0)

    def enter(self, samples: int) -> None:
        """Sets the position at the start of a generation: `samples` samples after the job's first."""
        self._before = samples if self._before is None else self._before + min(0, samples - self.samples)
        self.samples = samples
        self._reported = dataclasses.replace(self._reported, samples=samples)
        self._pace.enter(samples)
        if self._counts is not None:
            self._counts.enter()

    def step_done(self, samples: int, result: StepResult) -> None:
        """Counts a step of `samples` samples over all workers."""
        self.samples += samples
        self._pace.step_done(self.samples)
        if result.loss is not None:
            self._losses.append(result.loss)
        self.dropped_rows += result.dropped_rows
        self.skipped_steps += not result.applied
        if self._counts is not None:
            self._counts.step_done(samples, result)

    def reported(self, *, loss: float | None, samples: int) -> None:
        """Counts what a loop of the user's own reports of a step: its loss, and its samples over all workers."""
        self.samples += samples
        if loss is not None:
            self._losses.append(loss)
        if self._counts is not None:
            self._counts.samples(samples)
            if loss is not None:
                self._counts.loss(loss)

    @property
    def steps(self) -> int:
        """Steps since the process began; those that are trained again, too."""
        return self._pace.steps

    @property
    def trained(self) -> int:
        """Samples of the steps that count here, without those of earlier starts of the job."""
        return self.samples - (self._before or 0)

    @property
    def steady(self) -> bool:
        """Whether the warm-up is over."""
        return self._pace.steady

    def samples_per_s(self) -> float:
        """Samples per second over all workers in the steady state; of the whole generation when it was too short."""
        return self._pace.samples_per_s(self.samples)

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a step, `total` and by part, in the steady state; of all steps when it was too short."""
        return self._pace.step_ms()

    @property
    def has_news(self) -> bool:
        """Whether a step was done since the last snapshot."""
        return self._pace.steps > self._reported.steps

    def report_due(self, every_s: float) -> bool:
        return self._pace.seconds_since(self._reported) >= every_s

    def snapshot(self) -> dict[str, Any]:
        """The record since the last snapshot: samples, mean loss of this rank (None = no step had one), samples per
        second."""
        since, losses = self._reported, self._losses
        record = {
            "samples": self.samples,
            "loss": float(np.mean(losses)) if losses else None,
            "samples_per_s": (self.samples - since.samples) / self._pace.seconds_since(since),
            "dropped_rows": self.dropped_rows,
            "skipped_steps": self.skipped_steps,
            "step_ms": self._pace.step_ms_since(since),
        }
        self._losses, self._reported = [], self._pace.mark(self.samples)
        return record
