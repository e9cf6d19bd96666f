"""Selection of values: the largest, exactly as many as asked for, the same ones every time; shares of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.compression.selection.shares import keep_at, num_kept
from shardkeep.compression.selection.threshold_kernels import mark_largest
from tests.support.cases import every
from tests.support.examples import examples

anything = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def largest(values_N: np.ndarray, count: int) -> np.ndarray:
    marks_N = np.zeros(values_N.size, dtype=np.uint8)
    mark_largest(values_N.view(np.int32) & np.int32(0x7FFFFFFF), count, marks_N)
    return np.flatnonzero(marks_N)


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


def test_a_negative_key_is_never_taken() -> None:
    keys_N = np.array([5, -1, 3, -(2**31), 4], dtype=np.int32)
    marks_N = np.array([0, 7, 0, 7, 0], dtype=np.uint8)
    assert mark_largest(keys_N, 4, marks_N) == 3
    assert marks_N.tolist() == [1, 7, 1, 7, 1]


# ---- shares ----


def test_at_least_one_row_is_kept_and_none_of_none() -> None:
    shares = [(100, 0.07, 7), (10, 0.25, 3), (128, 0.001, 1), (3, 0.999, 3), (0, 0.5, 0), (1000, 0.001, 1), (0, 1, 0)]
    assert [num_kept(num_rows, keep) for num_rows, keep, _ in shares] == [kept for *_, kept in shares]


def test_the_share_falls_geometrically_to_its_value_in_steps_and_has_a_range() -> None:
    shares = [keep_at(step, 0.001, 4) for step in range(6)]
    assert shares == pytest.approx([0.251, 0.0631, 0.01585, 0.00398, 0.001, 0.001], rel=1e-2)
    assert keep_at(0, 0.1, 0) == 0.1
    assert [keep_at(step, 1.0, 5) for step in (0, 3, 9)] == [1.0, 1.0, 1.0]
    for keep in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"allowed: above 0, up to 1"):
            num_kept(2, keep)
