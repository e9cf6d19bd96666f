"""Student's t: what a handful of paired runs can say, and what they cannot. Knows no runs.

The distribution is scipy's (the extra `report`). Without scipy there are means and deviations alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.plugging.packages import missing

CONFIDENCE = 0.95
UNDEFINED = "undefined"
"""In place of a verdict over numbers that are not finite."""
POWER = 0.80
"""How often a difference should show that a comparison is said to be able to show."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` independent values. The other fields are None for a single value. Without scipy there is no
    interval."""

    count: int
    mean: float
    deviation: float | None = None
    """Standard deviation of the values, n - 1 in the denominator."""
    low: float | None = None
    high: float | None = None
    """The ends of the 95 % confidence interval of the mean, by Student's t with count - 1 degrees of freedom."""
    shows: float | None = None
    """The smallest true mean that these many values of this spread tell from 0 in 80 % of all cases."""


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval of `values`; None where there are none."""
    if len(values) < 2:
        return Estimate(1, values[0]) if values else None
    count, mean, deviation = len(values), statistics.fmean(values), statistics.stdev(values)
    if missing("scipy"):
        return Estimate(count, mean, deviation)
    from scipy.stats import t

    error = deviation / math.sqrt(count)
    half, power = (float(t.ppf(share, count - 1)) * error for share in (0.5 + CONFIDENCE / 2, POWER))
    return Estimate(count, mean, deviation, mean - half, mean + half, half + power)


def p_value(found: Estimate) -> float | None:
    """The probability of a mean at least as far from 0 as this one if the true mean is 0, by Student's t, both sides;
    None for a single value or without scipy. Values that are all equal give 1 at 0, else 0."""
    if found.deviation is None or missing("scipy"):
        return None
    if found.deviation == 0.0:
        return float(found.mean == 0.0)
    from scipy.stats import t

    return float(2.0 * t.sf(abs(found.mean) / found.deviation * math.sqrt(found.count), found.count - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of several comparisons, each as if it were the only one, after Holm's correction (Scandinavian
    Journal of Statistics 6, 1979): the chance that any of those at most a is wrong is at most a. In their order."""
    order, corrected = np.argsort(p_values), np.empty(len(p_values))
    scaled = np.sort(p_values) * np.arange(len(p_values), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    found: list[float] = corrected.tolist()
    return found
