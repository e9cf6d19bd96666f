"""Selection of rows and elements: the largest, a known number of them, the same ones every time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from shardkeep.compression.selection.largest_rows import largest_rows
from shardkeep.compression.selection.random_rows import random_rows
from shardkeep.compression.selection.shares import keep_at, num_kept
from tests.support.cases import every
from tests.support.examples import examples


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, 1)


def test_selected_rows_keep_their_signs() -> None:
    grad_UD = np.array([[-3, 1], [0.5, 0], [2, -4], [0, 0]], dtype=np.float32)
    positions = largest_rows(grad_UD, 0.5)
    assert positions.dtype == np.int64
    assert grad_UD[positions].tolist() == [[-3, 1], [2, -4]]


def test_negative_rows_are_as_large_as_positive_ones() -> None:
    assert largest_rows(column(-1, -5, -2, -4), 0.5).tolist() == [1, 3]


def test_of_equal_rows_the_first_are_taken() -> None:
    assert largest_rows(column(1, 2, 2, -2, 2, 1), 0.5).tolist() == [1, 2, 3]
    assert largest_rows(np.zeros((6, 4), np.float32), 0.5).tolist() == [0, 1, 2]


def test_at_least_one_row_is_kept_and_none_of_none() -> None:
    assert largest_rows(column(1, 3, 2), 1e-9).tolist() == [1]
    assert largest_rows(np.empty((0, 16), np.float32), 0.1).tolist() == []
    assert largest_rows(np.empty((0, 16), np.float32), 1.0).tolist() == []
    assert largest_rows(column(7), 0.1).tolist() == [0]


def test_all_rows_are_kept_with_a_share_of_one() -> None:
    assert largest_rows(column(3, 1, 2), 1.0).tolist() == [0, 1, 2]


@every(
    ("num_rows", "keep", "expected"),
    [(100, 0.07, 7), (10, 0.25, 3), (128, 0.001, 1), (3, 0.999, 3), (0, 0.5, 0), (1000, 0.001, 1)],
)
def test_the_number_of_kept_rows_is_the_share_rounded_up(num_rows: int, keep: float, expected: int) -> None:
    assert num_kept(num_rows, keep) == expected
    grad_UD = np.random.default_rng(0).normal(size=(num_rows, 2)).astype(np.float32)
    assert len(largest_rows(grad_UD, keep)) == expected


def test_norms_do_not_overflow_or_vanish() -> None:
    assert largest_rows(column(2e19, 3e19, 1e19), 0.3).tolist() == [1]
    assert largest_rows(column(2e-30, 3e-30, 1e-30), 0.3).tolist() == [1]


@every("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_row_that_is_not_finite_is_seen_not_hidden(bad: float) -> None:
    assert largest_rows(column(1, 1e30, bad, 2), 0.25).tolist() == [2]


@every("keep", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(ValueError, match=r"allowed: above 0, up to 1"):
        largest_rows(column(1, 2), keep)


@examples(200)
@given(
    grad_UD=arrays(np.float32, st.tuples(st.integers(1, 60), st.integers(1, 3)), elements=st.integers(-3, 3)),
    keep=st.floats(0.01, 1.0),
)
def test_selection_equals_a_stable_sort_by_norm(grad_UD: np.ndarray, keep: float) -> None:
    norms = (grad_UD.astype(np.float64) ** 2).sum(axis=1)
    expected = np.sort(np.argsort(-norms, kind="stable")[: num_kept(len(grad_UD), keep)])
    assert np.array_equal(largest_rows(grad_UD, keep), expected)


def rows(count: int) -> np.ndarray:
    return np.zeros((count, 1), np.float32)


def test_a_random_choice_has_no_duplicates_and_is_named_by_its_key() -> None:
    chosen = random_rows(rows(1000), 0.1, 7)
    assert chosen.size == 100
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, random_rows(rows(1000), 0.1, 7))
    assert not np.array_equal(chosen, random_rows(rows(1000), 0.1, 8))
    assert random_rows(rows(3), 1.0, 7).tolist() == [0, 1, 2]
    assert random_rows(rows(0), 0.1, 7).tolist() == []


def test_a_random_choice_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(1).item(), np.random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random_rows(rows(1000), 0.1, 7)
    assert (torch.rand(1).item(), np.random.random()) == expected


def test_a_random_choice_takes_every_position_equally_often() -> None:
    counts = np.zeros(20)
    for key in range(2000):
        counts[random_rows(rows(20), 0.25, key)] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_the_share_falls_geometrically_to_its_value_in_steps() -> None:
    shares = [keep_at(step, 0.001, 4) for step in range(6)]
    assert shares == pytest.approx([0.251, 0.0631, 0.01585, 0.00398, 0.001, 0.001], rel=1e-2)
    assert keep_at(0, 0.1, 0) == 0.1
    assert [keep_at(step, 1.0, 5) for step in (0, 3, 9)] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="allowed: above 0"):
        keep_at(0, 0.0, 5)
