"""Telemetry: what one worker counts while it trains, and how the counts of all workers become a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from shardkeep.workers.timing.cpu_time import CpuTime

# Steps whose time is not counted as steady: first touches, allocator, connections.
WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the stopwatch stood after a step."""

    steps: int
    seconds: Mapping[Part, float]


class Telemetry:
    """Samples, time, losses and dropped rows of one worker. Rates are of the watch's seconds of training.

    `watch` is switched by whoever takes a step; here it is only read."""

    def __init__(
        self, watch: Stopwatch, *, samples: int = 0, resumed: bool = False, cpu: CpuTime | None = None
    ) -> None:
        """`samples`: those of the steps before, where a job goes on; `resumed`: it was ended and started again."""
        self.watch = watch
        self.cpu = CpuTime() if cpu is None else cpu
        self.resumed = resumed
        self.samples = samples
        self._before = samples
        self.dropped_rows = 0
        self.skipped_steps = 0
        self._steps = 0
        self._started = (self.watch.now(), samples)
        self._steady_from: tuple[float, int] | None = None
        self._losses: list[float] = []
        self._reported = self.watch.now()
        self._reported_samples = samples
        self._all = _Mark(0, dict.fromkeys(PARTS, 0.0))
        self._steady, self._last = self._all, self._all
        self._done = 0

    def step_done(self, samples: int, result: StepResult) -> None:
        """Counts a step of `samples` samples over all workers."""
        self.samples += samples
        self._done += 1
        self._steps += 1
        self._losses.append(result.loss)
        self.dropped_rows += result.dropped_rows
        self.skipped_steps += not result.applied
        if self._steps == WARM_UP_STEPS:
            self._steady_from = (self.watch.now(), self.samples)
            self._steady = self._mark()

    @property
    def trained(self) -> int:
        """Samples of the steps counted here: without those before a job went on."""
        return self.samples - self._before

    @property
    def steady(self) -> bool:
        """Whether the steps of the start are over."""
        return self._steady_from is not None

    def go_back(self, samples: int) -> None:
        """Training goes on at another step, `samples` samples after the job's first."""
        self._before += min(0, samples - self.samples)
        self.samples = self._reported_samples = samples
        self._started = (self.watch.now(), samples)
        self._steady_from, self._steps = None, 0

    def samples_per_s(self) -> float:
        """Samples per second over all workers in the steady state; of the whole run when it was too short."""
        start, before = self._steady_from or self._started
        if self.samples == before:
            start, before = self._started
        return (self.samples - before) / max(self.watch.now() - start, 1e-9)

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a step, `total` and by part, over the steps that `samples_per_s` counts."""
        return self._mean_ms(self._steady if self._done > self._steady.steps else self._all)

    def _mark(self) -> _Mark:
        return _Mark(self._done, dict(self.watch.seconds))

    def _mean_ms(self, since: _Mark) -> dict[str, float]:
        steps = max(self._done - since.steps, 1)
        parts = {part: 1e3 * (self.watch.seconds[part] - since.seconds[part]) / steps for part in PARTS}
        return {name: round(ms, 4) for name, ms in ({"total": sum(parts.values())} | parts).items()}

    def report_due(self, every_s: float) -> bool:
        return self.watch.now() - self._reported >= every_s

    def snapshot(self) -> dict[str, Any]:
        """The record since the last snapshot: samples, mean loss of this rank, samples per second."""
        now = self.watch.now()
        rate = (self.samples - self._reported_samples) / max(now - self._reported, 1e-9)
        loss = float(np.mean(self._losses)) if self._losses else 0.0
        step_ms = self._mean_ms(self._last)
        self._losses, self._reported, self._reported_samples, self._last = [], now, self.samples, self._mark()
        return {
            "samples": self.samples,
            "loss": loss,
            "samples_per_s": rate,
            "dropped_rows": self.dropped_rows,
            "skipped_steps": self.skipped_steps,
            "step_ms": step_ms,
        }


def gather_records(collective: Collective, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's record, on every rank, in order of the ranks."""
    body = np.frombuffer(json.dumps(record).encode("utf-8"), dtype=np.uint8).copy()
    parts = collective.gather_arrays(body, purpose="agreements")
    return [json.loads(bytes(part).decode("utf-8")) for part in parts]


def merged_histogram(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sum of histograms with integer keys, sorted by key."""
    total: dict[int, int] = {}
    for part in parts:
        for key, count in part.items():
            total[int(key)] = total.get(int(key), 0) + count
    return {str(key): total[key] for key in sorted(total)}
