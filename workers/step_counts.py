"""StepCounts: what the steps of one process come to, for its telemetry. Any thread may read."""

from __future__ import annotations

import math
from typing import Any

from shardkeep.base.histogram import Histogram
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import Stopwatch


class StepCounts:
    """Counts steps, those that are trained again too. Only reads the stopwatch."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._steps = self._samples = self._ids = self._unique_ids = self._losses = self._bad_losses = 0
        self._loss_sum = 0.0
        self._durations, self._pull_waits = Histogram(), Histogram()
        self.enter()

    def enter(self) -> None:
        """The next step follows no other."""
        self._began_s, self._waited_s = self._watch.now(), self._watch.seconds["pull_wait"]

    def step_done(self, samples: int, result: StepResult) -> None:
        """Counts a step of `samples` samples over all workers, which ends now."""
        self._steps += 1
        self._samples += samples
        self._ids += result.ids
        self._unique_ids += result.unique_ids
        if result.loss is not None:
            self.loss(result.loss)
        now_s, waited_s = self._watch.now(), self._watch.seconds["pull_wait"]
        self._durations.add(now_s - self._began_s)
        self._pull_waits.add(waited_s - self._waited_s)
        self._began_s, self._waited_s = now_s, waited_s

    def loss(self, loss: float) -> None:
        """Counts the loss of a step."""
        self._losses += 1
        if math.isfinite(loss):
            self._loss_sum += loss
        else:
            self._bad_losses += 1

    def samples(self, samples: int) -> None:
        """Counts samples of a step that is under way or done."""
        self._samples += samples

    @property
    def num_steps(self) -> int:
        return self._steps

    def figures(self) -> dict[str, Any]:
        """The counts so far: `losses` is the number of losses of this rank, `bad_losses` of those that are not
        finite, `loss_sum` the sum of the others; `ids` are those of this rank's samples, `unique_ids` the distinct
        ones of each step and table. The histograms are of steps by seconds (`base/histogram.py`)."""
        return {
            "steps": self._steps,
            "trained_samples": self._samples,
            "losses": self._losses,
            "loss_sum": self._loss_sum,
            "bad_losses": self._bad_losses,
            "ids": self._ids,
            "unique_ids": self._unique_ids,
            "step_histogram": self._durations.figures(),
            "pull_wait_histogram": self._pull_waits.figures(),
        }
