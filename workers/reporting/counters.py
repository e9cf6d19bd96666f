"""Counters: what the steps of one worker come to, and how fast they are. Any thread may read.

All but `samples`, the job's position, only grow. A rate or a mean is a difference of two moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardkeep.base.histogram import Histogram
from shardkeep.workers.step import StepLoss, StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from shardkeep.workers.timing.cpu_time import CpuMeter

WARM_UP_STEPS = 10
"""Steps whose time does not count as steady: first touches, allocator, connections."""


@dataclass(slots=True)
class Counts:
    """What a worker has counted so far, over all workers where samples are meant, else of this rank: `bad_losses` are
    those that are not finite, `loss_sum` the sum of the others, `unique_ids` the distinct ids of each step and table.
    `train_s`, `step_s`: seconds of training, in all and by part of a step."""

    steps: int = 0
    samples: int = 0
    trained_samples: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    bad_losses: int = 0
    ids: int = 0
    unique_ids: int = 0
    dropped_rows: int = 0
    skipped_steps: int = 0
    train_s: float = 0.0
    step_s: Mapping[Part, float] = field(default_factory=dict)

    def samples_per_s(self, since: Counts) -> float:
        """Samples per second of training."""
        return (self.samples - since.samples) / max(self.train_s - since.train_s, 1e-9)

    def step_ms(self, since: Counts) -> dict[str, float]:
        """Mean milliseconds of a step, `total` and by part."""
        steps = max(self.steps - since.steps, 1)
        parts = {part: 1e3 * (self.step_s[part] - since.step_s[part]) / steps for part in PARTS}
        return {name: round(ms, 4) for name, ms in ({"total": sum(parts.values())} | parts).items()}

    def loss(self, since: Counts) -> float | None:
        """Mean loss; None = no step had one, NaN = one was not finite."""
        if self.bad_losses > since.bad_losses:
            return math.nan
        losses = self.losses - since.losses
        return (self.loss_sum - since.loss_sum) / losses if losses else None


class StepCounters:
    """Counts the steps of one worker since its process began, those that are trained again, too. Samples are those of
    all workers. Rates are of the watch's seconds of training.

    Args:
        watch: The step switches it; this only reads it.
        resumed: Whether the job began from a checkpoint.
        cpu: CPU seconds of training.

    Attributes:
        counts: So far, without seconds.
    """

    def __init__(self, watch: Stopwatch, *, resumed: bool = False, cpu: CpuMeter | None = None) -> None:
        self.watch = watch
        self.cpu = CpuMeter() if cpu is None else cpu
        self.resumed = resumed
        self.counts = Counts()
        self._histograms = {"step_histogram": Histogram(), "pull_wait_histogram": Histogram()}
        self._before: int | None = None  # samples of the steps before the first one here; None = not known yet
        self._first = self._entered = self._reported = self._now()
        self._steady: Counts | None = None
        self._step_began = _times(self.watch)
        self._late: StepLoss | None = None

    def enter(self, samples: int) -> None:
        """Sets the position at the start of a generation: `samples` samples after the job's first. Another warm-up
        begins."""
        self.settle()
        self._before = samples if self._before is None else self._before + min(0, samples - self.samples)
        self.counts.samples = samples
        self._reported = replace(self._reported, samples=samples)
        self._entered = self._now()
        self._step_began = _times(self.watch)

    def step_done(self, samples: int, result: StepResult) -> None:
        """Counts a step of `samples` samples, which ends now.

        Its loss is counted as soon as that waits for no device: on a CPU now, on a GPU by the end of the next step, or
        when a report needs it. So the records of jobs on CPUs have the losses of all their steps."""
        self.settle()
        counts = self.counts
        counts.steps += 1
        counts.ids += result.ids
        counts.unique_ids += result.unique_ids
        counts.dropped_rows += result.dropped_rows
        counts.skipped_steps += not result.applied
        self.reported(loss=None, samples=samples)
        self._late = result.loss
        if self._late is not None and self._late.ready:
            self.settle()
        if counts.steps - self._entered.steps == WARM_UP_STEPS:
            self._steady = self._now()
        began_s, self._step_began = self._step_began, _times(self.watch)
        for histogram, began, ends in zip(self._histograms.values(), began_s, self._step_began, strict=True):
            histogram.add(ends - began)

    def settle(self) -> None:
        """Counts the loss of the last step. May wait for it; the training thread alone calls it."""
        late, self._late = self._late, None
        if late is not None:
            self.reported(loss=float(late), samples=0)

    def reported(self, *, loss: float | None, samples: int) -> None:
        """Counts the loss of a step, and samples of one that is under way or done."""
        counts = self.counts
        counts.samples += samples
        counts.trained_samples += samples
        if loss is not None:
            finite = math.isfinite(loss)
            counts.losses += 1
            counts.loss_sum += loss if finite else 0.0
            counts.bad_losses += not finite

    @property
    def samples(self) -> int:
        """The job's position."""
        return self.counts.samples

    @property
    def trained(self) -> int:
        """Samples of the steps that count here, without those of earlier starts of the job."""
        return self.samples - (self._before or 0)

    @property
    def steady(self) -> bool:
        """Whether the warm-up is over."""
        return self._steady is not None and self._steady.steps > self._entered.steps

    def samples_per_s(self) -> float:
        """Samples per second in the steady state; of the whole generation when it was too short."""
        steady = self._steady if self.steady else None
        since = self._entered if steady is None or steady.samples == self.samples else steady
        return self._now().samples_per_s(since)

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a step, `total` and by part, in the steady state; of all steps when it was too short."""
        steady = self._steady
        return self._now().step_ms(steady if steady is not None and self.counts.steps > steady.steps else self._first)

    @property
    def has_news(self) -> bool:
        """Whether a step was done since the last report."""
        return self.counts.steps > self._reported.steps

    def report_due(self, every_s: float) -> bool:
        return self.watch.now() - self._reported.train_s >= every_s

    def report(self) -> dict[str, Any]:
        """The record since the last report: position, mean loss of this rank, samples per second."""
        self.settle()
        since, self._reported = self._reported, self._now()
        now = self._reported
        return {
            "samples": now.samples,
            "loss": now.loss(since),
            "samples_per_s": now.samples_per_s(since),
            "dropped_rows": now.dropped_rows,
            "skipped_steps": now.skipped_steps,
            "step_ms": now.step_ms(since),
        }

    def figures(self) -> dict[str, Any]:
        """The counts so far, and histograms of steps by seconds (`base/histogram.py`)."""
        return asdict(self._now()) | {name: each.figures() for name, each in self._histograms.items()}

    def _now(self) -> Counts:
        return replace(self.counts, train_s=self.watch.now(), step_s=dict(self.watch.seconds))


def _times(watch: Stopwatch) -> tuple[float, float]:
    """Seconds of training, and of waits for rows."""
    return watch.now(), watch.seconds["pull_wait"]
