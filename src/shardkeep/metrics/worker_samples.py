"""What a worker's metrics say, from its figures (workers/reporting/figures.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from shardkeep.metrics.collector import Bins, Figures, Sample, of_record, seconds_bins
from shardkeep.records.telemetry import WorkerTelemetry
from shardkeep.workers.reporting.figures import WorkerFigures

LOSS_S = 10.0
"""Seconds of training, at least, that the loss is a mean over."""
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Upper bounds of the bins, in steps; the last one is the largest bound that a config may have."""


class WorkerSamples:
    """Reads one worker's figures at each scrape.

    Args:
        figures: Returns them; None = the worker has not begun.
        staleness: The bound of the config.
        servers: Their number.
    """

    def __init__(
        self,
        figures: Callable[[], WorkerFigures | None],
        *,
        staleness: int,
        servers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures, self._staleness, self._servers = figures, staleness, servers
        self._loss = _RecentLoss(clock)

    def __call__(self) -> Iterator[Sample]:
        yield Sample("staleness_bound_steps", self._staleness)
        if (source := self._figures()) is None:
            return
        figures = source.figures()
        yield from of_record(WorkerTelemetry, figures)
        if (loss := self._loss.mean(figures)) is not None:
            yield Sample("train_loss", loss)
        yield from _times(figures)
        for server in range(self._servers):
            seconds = figures["wait_s"].get(f"server {server}", 0.0)
            yield Sample("server_wait_seconds_total", seconds, {"server": str(server)})
        yield from _bytes(figures)
        yield Sample("pull_staleness_steps", staleness_bins(figures["staleness"]))


class _RecentLoss:
    """The mean loss of the steps of the last seconds, however often it is read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks = [(clock(), 0.0, 0), (clock(), 0.0, 0)]

    def mean(self, figures: Figures) -> float | None:
        """None before the first step, and while losses are not finite."""
        now = (self._clock(), float(figures["loss_sum"]), int(figures["losses"] - figures["bad_losses"]))
        if now[0] - self._marks[1][0] >= LOSS_S:
            self._marks = [self._marks[1], now]
        _, loss_sum, steps = self._marks[0]
        return None if now[2] <= steps else (now[1] - loss_sum) / (now[2] - steps)


def _times(figures: Figures) -> Iterator[Sample]:
    parts: Mapping[str, float] = figures["step_s"]
    yield Sample("step_duration_seconds", seconds_bins(figures["step_histogram"], sum(parts.values())))
    yield Sample("pull_wait_seconds", seconds_bins(figures["pull_wait_histogram"], parts["pull_wait"]))
    for part, seconds in parts.items():
        yield Sample("step_part_seconds_total", seconds, {"part": part})


def _bytes(figures: Figures) -> Iterator[Sample]:
    for direction, parts in figures["bytes"].items():
        if isinstance(parts, Mapping):  # the others are sums of these
            for kind, size in parts.items():
                yield Sample("bytes_total", size, {"direction": direction, "kind": kind})
    yield Sample("bytes_total", figures["bytes"]["control"], {"direction": "control", "kind": "all"})
    for direction, size in figures["fp32_bytes"].items():
        yield Sample("fp32_bytes_total", size, {"direction": direction})


def staleness_bins(times: Mapping[str, int]) -> Bins:
    """The histogram of pulls, from the number of pulls by their steps."""
    counts: dict[float, int] = dict.fromkeys([*map(float, STALENESS), float("inf")], 0)
    for steps, pulls in times.items():
        counts[next(bound for bound in counts if int(steps) <= bound)] += pulls
    return Bins(counts, sum=float(sum(int(steps) * pulls for steps, pulls in times.items())))
