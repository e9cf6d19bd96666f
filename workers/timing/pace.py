"""Pace: how fast a worker trains, in samples per second and in milliseconds of a step, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch

WARM_UP_STEPS = 10
"""Steps whose time does not count as steady: first touches, allocator, connections."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A worker's position after a step: seconds of training, samples, steps, seconds by part."""

    now_s: float
    samples: int
    steps: int
    seconds: Mapping[Part, float]


class Pace:
    """Counts steps against a stopwatch, which it only reads. Samples are those of all workers."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._steps = 0
        self._first = Mark(watch.now(), 0, 0, dict.fromkeys(PARTS, 0.0))
        self._entered = self._first
        self._steady: Mark | None = None

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    def enter(self, samples: int) -> None:
        """Starts another warm-up: training continues after `samples` samples."""
        self._entered = self.mark(samples)

    def step_done(self, samples: int) -> None:
        """Counts a step that ends after `samples` samples."""
        self._steps += 1
        if self._steps - self._entered.steps == WARM_UP_STEPS:
            self._steady = self.mark(samples)

    @property
    def steady(self) -> bool:
        """Whether the warm-up is over."""
        return self._steady is not None and self._steady.steps > self._entered.steps

    def mark(self, samples: int) -> Mark:
        """Returns the position after the last step."""
        return Mark(self._watch.now(), samples, self._steps, dict(self._watch.seconds))

    def samples_per_s(self, samples: int) -> float:
        """Returns the rate in the steady state, or since the last `enter` if no steady step is done."""
        since = self._steady if self.steady else self._entered
        if since is None or since.samples == samples:
            since = self._entered
        return (samples - since.samples) / self.seconds_since(since)

    def seconds_since(self, mark: Mark) -> float:
        """Returns the seconds of training since `mark`, never 0."""
        return max(self._watch.now() - mark.now_s, 1e-9)

    def step_ms(self) -> dict[str, float]:
        """Returns the mean milliseconds of a steady step, or of all steps if none is steady: `total` and by part."""
        steady = self._steady
        return self.step_ms_since(steady if steady is not None and self._steps > steady.steps else self._first)

    def step_ms_since(self, mark: Mark) -> dict[str, float]:
        """Returns the mean milliseconds of a step since `mark`: `total` and by part."""
        steps = max(self._steps - mark.steps, 1)
        parts = {part: 1e3 * (self._watch.seconds[part] - mark.seconds[part]) / steps for part in PARTS}
        return {name: round(ms, 4) for name, ms in ({"total": sum(parts.values())} | parts).items()}
