"""The paired comparison by Student's t, against printed tables and numbers worked out by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from shardkeep.sweep.student import Estimate, estimate, holm, p_value
from tests.support.cases import every


def test_the_interval_is_that_worked_out_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), error sqrt(0.5), t of 4 is 2.7764
    assert found is not None
    assert (found.count, found.mean) == (5, 3.0)
    assert found.deviation == pytest.approx(1.5811, abs=1e-4)
    assert (found.low, found.high) == (pytest.approx(1.0368, abs=1e-4), pytest.approx(4.9632, abs=1e-4))
    assert found.shows == pytest.approx((2.7764 + 0.9410) * math.sqrt(0.5), abs=1e-4)


def test_without_scipy_there_are_means_and_deviations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    found = estimate([1.0, 2.0, 3.0])
    assert found == Estimate(3, 2.0, 1.0)
    assert p_value(Estimate(3, 2.0, 1.0)) is None


def test_one_value_has_no_interval_none_no_mean_and_equal_values_a_certain_p_value() -> None:
    one = estimate([0.25])
    assert one is not None
    assert (one.mean, one.deviation, one.low, one.high, one.shows) == (0.25, None, None, None, None)
    assert estimate([]) is None
    for values, expected in (([0.01, 0.01], 0.0), ([0.0, 0.0], 1.0), ([0.5], None)):
        found = estimate(values)
        assert found is not None and p_value(found) == expected


@every(
    ("probability", "freedom", "quantile"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.95, 5, 2.0150), (0.995, 3, 5.8409)],  # of any textbook
)
def test_the_p_value_at_a_quantile_of_the_table_is_both_tails(
    probability: float, freedom: int, quantile: float
) -> None:
    rng = np.random.default_rng(freedom)
    spread = rng.normal(size=freedom + 1)
    spread = (spread - spread.mean()) / spread.std(ddof=1)
    mean = quantile / math.sqrt(freedom + 1)
    for sign in (1, -1):
        found = estimate((spread + sign * mean).tolist())
        assert found is not None
        assert p_value(found) == pytest.approx(2 * (1 - probability), rel=1e-3)


def test_several_comparisons_are_corrected_as_holm_says() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6, 0.01]) == pytest.approx([0.8, 0.8, 0.03])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
