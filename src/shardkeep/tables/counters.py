"""What eviction counts of a table's rows, as histograms: ages and scores. Reads no file."""

# N = rows of a block

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkeep.base.arrays import Float64s, UInt32s
from shardkeep.ps.server.table.policies.config import EvictConfig

_LEAST_AGE = 0
_LEAST_SCORE = -6
"""Exponents of two below which numbers are in one bin."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows whose number is at least `first` and below `end`."""

    first: float
    end: float
    rows: int

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {"from": self.first, "below": self.end, "rows": self.rows}


class Histogram:
    """Counts numbers, at least 0, in bins that are twice as wide each. Numbers below 2**least are in one bin."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._counts: Counter[int] = Counter()

    def add(self, numbers_N: Float64s) -> None:
        """Counts finite numbers."""
        exponents_N = np.where(numbers_N < 2.0**self._least, self._least - 1, np.frexp(numbers_N)[1] - 1)
        exponents, counts = np.unique(exponents_N, return_counts=True)
        self._counts.update(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))

    def bins(self) -> tuple[Bin, ...]:
        """From the first bin with rows to the last one."""
        if not self._counts:
            return ()
        span = range(min(self._counts), max(self._counts) + 1)
        return tuple(Bin(0.0 if e < self._least else 2.0**e, 2.0 ** (e + 1), self._counts[e]) for e in span)


@dataclass(slots=True)
class CounterTally:
    """Ages and scores of the rows of one table, while blocks pass.

    `now`: the clock at the checkpoint: the last step that was applied, of this job and those before it, or seconds."""

    evict: EvictConfig
    now: int
    ages: Histogram = field(default_factory=lambda: Histogram(_LEAST_AGE))
    scores: Histogram = field(default_factory=lambda: Histogram(_LEAST_SCORE))

    def add(self, counters_N2: UInt32s) -> None:
        """Counts rows by their counters (ps/server/table/policies/policy_kernels.py)."""
        ages_N = np.maximum(self.now - counters_N2[:, 0].astype(np.int64), 0).astype(np.float64)
        scores_N = np.ascontiguousarray(counters_N2[:, 1]).view(np.float32).astype(np.float64)
        self.ages.add(ages_N)
        self.scores.add(scores_N * np.exp(math.log(self.evict.decay) / self.evict.decay_steps * ages_N))
