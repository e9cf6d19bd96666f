"""What a handful of runs can say: means with intervals, and whether paired differences are significant.

Intervals and p values are of Student's t by scipy (the extra `report`). Without it there are means and deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.plugging.packages import missing

CONFIDENCE, POWER = 0.95, 0.80
UNDEFINED = "undefined"
"""In place of a verdict over numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` independent values. The other fields are None for a single value, and without scipy, which
    gives all but the deviation.

    Attributes:
        deviation: Standard deviation of the values, n - 1 in the denominator.
        low: With `high`, the ends of the 95 % confidence interval of the mean.
        shows: The smallest true mean that so many values of this spread distinguish from 0 in 80 % of all cases.
        p: The probability of a mean at least as far from 0 if the true mean is 0, both sides.
    """

    count: int
    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None
    shows: float | None = None
    p: float | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, interval and p value of a t test of `values` against 0; None where there are none."""
    if len(values) < 2:
        return Estimate(1, values[0]) if values else None
    count, mean, deviation = len(values), statistics.fmean(values), statistics.stdev(values)
    if missing("scipy"):
        return Estimate(count, mean, deviation)
    if deviation == 0.0:  # the test divides by it
        return Estimate(count, mean, 0.0, mean, mean, 0.0, float(mean == 0.0))
    from scipy.stats import t, ttest_1samp

    found = ttest_1samp(values, 0.0)
    low, high = map(float, found.confidence_interval(CONFIDENCE))
    shows = float(t.ppf([0.5 + CONFIDENCE / 2, POWER], count - 1).sum()) * deviation / math.sqrt(count)
    return Estimate(count, mean, deviation, low, high, shows, float(found.pvalue))


def verdict(loss: Estimate, p: float | None) -> str:
    """What a paired loss of AUC with a corrected p value says."""
    if p is None:
        return "one seed: no conclusion" if loss.count == 1 else "not tested without scipy"
    if not math.isfinite(loss.mean + p):
        return UNDEFINED
    if p >= 1.0 - CONFIDENCE:
        return "cannot be distinguished from no loss"
    return "lower AUC" if loss.mean > 0 else "higher AUC"


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of several comparisons, each as if it were the only one, after Holm's correction (Scandinavian
    Journal of Statistics 6, 1979): the chance that any of those at most a is wrong is at most a. In their order."""
    order, corrected = np.argsort(p_values), np.empty(len(p_values))
    scaled = np.sort(p_values) * np.arange(len(p_values), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    found: list[float] = corrected.tolist()
    return found
