"""Student's t and the paired comparison, against printed tables and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardkeep.sweep.student import estimate, holm, p_value, t_cdf, t_quantile

TABLE = {  # of any textbook
    (0.975, 1): 12.7062,
    (0.975, 2): 4.3027,
    (0.975, 4): 2.7764,
    (0.975, 9): 2.2622,
    (0.975, 30): 2.0423,
    (0.95, 5): 2.0150,
    (0.80, 4): 0.9410,
    (0.995, 3): 5.8409,
    (0.975, 10**6): 1.95997,
}


@pytest.mark.parametrize(("probability", "freedom"), TABLE)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(TABLE[probability, freedom], abs=6e-5)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-TABLE[probability, freedom], abs=6e-5)


def test_the_distribution_is_exact_where_it_has_a_formula() -> None:
    for x in np.linspace(-9.0, 9.0, 37):
        assert t_cdf(x, 1) == pytest.approx(0.5 + math.atan(x) / math.pi, abs=1e-12)
        assert t_cdf(x, 2) == pytest.approx(0.5 + x / (2 * math.sqrt(2 + x * x)), abs=1e-12)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_what_has_no_quantile_is_refused(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        t_quantile(probability, freedom)


def test_the_interval_is_that_worked_out_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), error sqrt(0.5), t of 4 is 2.7764
    assert found is not None
    assert (found.count, found.mean) == (5, 3.0)
    assert found.deviation == pytest.approx(1.5811, abs=1e-4)
    assert (found.low, found.high) == (pytest.approx(1.0368, abs=1e-4), pytest.approx(4.9632, abs=1e-4))
    assert found.shows == pytest.approx((2.7764 + 0.9410) * math.sqrt(0.5), abs=1e-4)


def test_the_interval_holds_the_mean_95_times_in_100_and_the_power_is_kept() -> None:
    rng, inside, seen = np.random.default_rng(5), 0, 0
    draws = rng.normal(0.0, 1.0, (4000, 5))
    smallest = (t_quantile(0.975, 4) + t_quantile(0.8, 4)) / math.sqrt(5)  # with the true deviation
    for row in draws:
        found = estimate(row.tolist())
        assert found is not None and found.low is not None and found.high is not None
        inside += found.low <= 0.0 <= found.high
        seen += found.low + smallest > 0.0  # the same values around a true mean of `smallest`
    assert inside / len(draws) == pytest.approx(0.95, abs=0.01)
    assert seen / len(draws) == pytest.approx(0.8, abs=0.06)  # the normal approximation of the noncentral t


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    one = estimate([0.25])
    assert one is not None
    assert (one.mean, one.deviation, one.low, one.high, one.shows) == (0.25, None, None, None, None)
    assert estimate([]) is None


@pytest.mark.parametrize(("probability", "freedom"), [(0.975, 1), (0.975, 4), (0.95, 5), (0.995, 3)])
def test_the_p_value_at_a_quantile_of_the_table_is_both_tails(probability: float, freedom: int) -> None:
    rng = np.random.default_rng(freedom)
    spread = rng.normal(size=freedom + 1)
    spread = (spread - spread.mean()) / spread.std(ddof=1)
    mean = TABLE[probability, freedom] / math.sqrt(freedom + 1)
    for sign in (1, -1):
        found = estimate((spread + sign * mean).tolist())
        assert found is not None
        assert p_value(found) == pytest.approx(2 * (1 - probability), rel=1e-3)


def test_equal_values_have_a_certain_p_value_and_one_value_has_none() -> None:
    for values, expected in (([0.01, 0.01], 0.0), ([0.0, 0.0], 1.0), ([0.5], None)):
        found = estimate(values)
        assert found is not None
        assert p_value(found) == expected


def test_several_comparisons_are_corrected_as_holm_says() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6, 0.01]) == pytest.approx([0.8, 0.8, 0.03])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_a_difference_where_there_is_none_is_told_once_in_twenty_families_at_most() -> None:
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(400):
        found = [estimate(rng.normal(size=5).tolist()) for _ in range(6)]
        wrong += min(holm([p for one in found if one and (p := p_value(one)) is not None])) < 0.05
    assert wrong / 400 == pytest.approx(0.045, abs=0.025)
