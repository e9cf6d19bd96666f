"""Histogram: counts durations by size. Knows nothing of what lasts."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the bins, in seconds. One more bin has all that is longer."""


class Histogram:
    """Counts durations in seconds. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def figures(self) -> dict[str, int]:
        """The number of durations in each bin, by its upper bound in seconds; the last bin is "inf"."""
        return dict(zip([*map(str, BOUNDS_S), "inf"], self._counts, strict=True))
