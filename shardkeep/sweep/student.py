"""Student's t: what a handful of paired runs can say, and what they cannot. Plain arithmetic; knows no runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.80
"""How often a difference should show that a comparison is said to be able to show."""

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` independent values. `low`, `high`, `deviation` and `shows` are None for a single value."""

    count: int
    mean: float
    deviation: float | None
    """Standard deviation of the values, n - 1 in the denominator."""
    low: float | None
    high: float | None
    """The ends of the 95 % confidence interval of the mean, by Student's t with count - 1 degrees of freedom."""
    shows: float | None
    """The smallest true mean that these many values of this spread tell from 0 in 80 % of all cases."""


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval of `values`; None where there are none."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(1, mean, None, None, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    error, half = deviation / math.sqrt(count), t_quantile(0.5 + CONFIDENCE / 2, count - 1)
    shows = (half + t_quantile(POWER, count - 1)) * error
    return Estimate(count, mean, deviation, mean - half * error, mean + half * error, shows)


def p_value(found: Estimate) -> float | None:
    """The probability of a mean at least as far from 0 as this one if the true mean is 0, by Student's t, both sides;
    None for a single value. Values that are all equal give 1 at 0, else 0."""
    if found.deviation is None:
        return None
    if found.deviation == 0.0:
        return float(found.mean == 0.0)
    squared = found.mean**2 * found.count / found.deviation**2
    freedom = found.count - 1
    return _incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + squared))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of several comparisons, each as if it were the only one, after Holm's correction (Scandinavian
    Journal of Statistics 6, 1979): the chance that any of those at most a is wrong is at most a. In their order."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = highest
    return corrected


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom stays below with this probability, to 1e-9.

    Raises ValueError: a probability outside (0, 1) or fewer than one degree of freedom."""
    if not 0.0 < probability < 1.0 or freedom < 1:
        raise ValueError(f"probability {probability}, {freedom} degrees of freedom; allowed: within (0, 1), 1 or more")
    if probability < 0.5:
        return -t_quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        low, high = high, 2.0 * high
    while high - low > 1e-10 * max(high, 1.0):
        middle = (low + high) / 2.0
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2.0


def t_cdf(value: float, freedom: int) -> float:
    """The probability that Student's t with `freedom` degrees of freedom is at most `value`."""
    tail = 0.5 * _incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + value * value))
    return 1.0 - tail if value > 0 else tail


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast on the other side
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return scale * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction 1 / (1 + d1 / (1 + d2 / (1 + ...)))."""
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
