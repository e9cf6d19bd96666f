"""The k largest magnitudes: exactly k, in O(n), for any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.compression.selection.largest_rows import largest
from shardkeep.compression.selection.threshold_kernels import mark_largest
from tests.support.cases import every
from tests.support.examples import examples

anything = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def by_sorting(values_N: np.ndarray, count: int) -> np.ndarray:
    magnitudes = values_N.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return np.sort(np.argsort(~magnitudes, kind="stable")[:count])


@examples(100)
@given(values_N=arrays(np.float32, st.integers(0, 80), elements=anything), count=st.integers(0, 90))
def test_any_bits_are_chosen_as_a_stable_sort_of_magnitudes_would(values_N: np.ndarray, count: int) -> None:
    assert np.array_equal(largest(values_N, count), by_sorting(values_N, count))


@every("spread", ["one bin", "one value but the last", "many octaves"])
def test_large_inputs_are_chosen_exactly(spread: str) -> None:
    rng = np.random.default_rng(0)
    values_N = {
        "one bin": 1 + rng.random(20_000) / 16,
        "one value but the last": np.append(np.full(19_999, -0.5), 0.25),
        "many octaves": rng.standard_cauchy(20_000) ** 5,
    }[spread].astype(np.float32)
    for count in (1, 7, 200, 19_999, 20_000):
        assert np.array_equal(largest(values_N, count), by_sorting(values_N, count))


def test_all_negative_values_are_chosen_by_magnitude() -> None:
    assert largest(np.array([-1, -9, -3, -7], dtype=np.float32), 2).tolist() == [1, 3]


@every("value", [0.0, -2.0], ids=str)
def test_of_equal_values_exactly_as_many_as_asked_for_the_first_ones(value: float) -> None:
    assert largest(np.full(100, value, dtype=np.float32), 3).tolist() == [0, 1, 2]


def test_what_is_not_finite_is_seen_first() -> None:
    values_N = np.array([3e38, -np.inf, 1, np.nan, np.inf], dtype=np.float32)
    assert largest(values_N, 1).tolist() == [3]
    assert largest(values_N, 3).tolist() == [1, 3, 4]


def test_values_from_the_end_are_not_starved() -> None:
    values_N = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    positions = largest(values_N, 1000)
    assert positions.size == 1000
    assert 400 < np.count_nonzero(positions >= 50_000) < 600


def test_a_negative_key_is_never_taken() -> None:
    keys_N = np.array([5, -1, 3, -(2**31), 4], dtype=np.int32)
    marks_N = np.array([0, 7, 0, 7, 0], dtype=np.uint8)
    assert mark_largest(keys_N, 4, marks_N) == 3
    assert marks_N.tolist() == [1, 7, 1, 7, 1]


@every("wrong", [np.zeros(3), np.zeros((3, 1), np.float32), np.zeros(6, np.float32)[::2]], ids=str)
def test_values_of_another_form_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(TypeError, match="contiguous float32"):
        largest(wrong, 1)
