"""Row selection: the largest rows, a known number of them, the same ones every time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.compression.topk import num_kept, select_rows


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, 1)


def test_selected_rows_keep_their_signs() -> None:
    grad_UD = np.array([[-3, 1], [0.5, 0], [2, -4], [0, 0]], dtype=np.float32)
    positions = select_rows(grad_UD, 0.5)
    assert positions.dtype == np.int64
    assert grad_UD[positions].tolist() == [[-3, 1], [2, -4]]


def test_negative_rows_are_as_large_as_positive_ones() -> None:
    assert select_rows(column(-1, -5, -2, -4), 0.5).tolist() == [1, 3]


def test_of_equal_rows_the_first_are_taken() -> None:
    assert select_rows(column(1, 2, 2, -2, 2, 1), 0.5).tolist() == [1, 2, 3]
    assert select_rows(np.zeros((6, 4), np.float32), 0.5).tolist() == [0, 1, 2]


def test_at_least_one_row_is_kept_and_none_of_none() -> None:
    assert select_rows(column(1, 3, 2), 1e-9).tolist() == [1]
    assert select_rows(np.empty((0, 16), np.float32), 0.1).tolist() == []
    assert select_rows(np.empty((0, 16), np.float32), 1.0).tolist() == []
    assert select_rows(column(7), 0.1).tolist() == [0]


def test_all_rows_are_kept_with_a_share_of_one() -> None:
    assert select_rows(column(3, 1, 2), 1.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_rows", "keep", "expected"),
    [(100, 0.07, 7), (10, 0.25, 3), (128, 0.001, 1), (3, 0.999, 3), (0, 0.5, 0), (1000, 0.001, 1)],
)
def test_the_number_of_kept_rows_is_the_share_rounded_up(num_rows: int, keep: float, expected: int) -> None:
    assert num_kept(num_rows, keep) == expected
    grad_UD = np.random.default_rng(0).normal(size=(num_rows, 2)).astype(np.float32)
    assert len(select_rows(grad_UD, keep)) == expected


def test_norms_do_not_overflow_or_vanish() -> None:
    assert select_rows(column(2e19, 3e19, 1e19), 0.3).tolist() == [1]
    assert select_rows(column(2e-30, 3e-30, 1e-30), 0.3).tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_row_that_is_not_finite_is_seen_not_hidden(bad: float) -> None:
    assert select_rows(column(1, 1e30, bad, 2), 0.25).tolist() == [2]


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(ValueError, match=r"allowed: above 0, up to 1"):
        select_rows(column(1, 2), keep)


@settings(deadline=None, max_examples=200)
@given(
    grad_UD=arrays(np.float32, st.tuples(st.integers(1, 60), st.integers(1, 3)), elements=st.integers(-3, 3)),
    keep=st.floats(0.01, 1.0),
)
def test_selection_equals_a_stable_sort_by_norm(grad_UD: np.ndarray, keep: float) -> None:
    norms = (grad_UD.astype(np.float64) ** 2).sum(axis=1)
    expected = np.sort(np.argsort(-norms, kind="stable")[: num_kept(len(grad_UD), keep)])
    assert np.array_equal(select_rows(grad_UD, keep), expected)
