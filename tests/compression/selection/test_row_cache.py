"""Cached rows in the slots of a row pool: good for a lease, never older, and never at the cost of a residual."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.row_cache import RowCache
from shardkeep.compression.selection.rows import Rows
from shardkeep.compression.selection.slots import RowSlots

D = 3
ONE, FOUR = np.array([0, 1, 1]), np.array([4])
"""The row of the first table's id 4."""


def new_cache(capacity: int = 8, *, history: int = 0) -> tuple[RowCache, ResidualPool]:
    """A cache and the pool that shares its slots."""
    slots = RowSlots(width=D, capacity=capacity, history=history)
    pool = ResidualPool(Rows(), slots, dim=D, keys_T=np.arange(2, dtype=np.uint64))
    return RowCache(slots, num_tables=2, dim=D), pool


def starts(*counts: int) -> np.ndarray:
    return np.cumsum([0, *counts])


def rows(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, dtype=np.float32)[:, None], D, axis=1)


def found(
    cache: RowCache, step: int, ids: list[int], lease: int = 100, table: int = 0, drift: float = math.inf
) -> list[float]:
    """The values of the cached rows among `ids`; NaN for the others."""
    out_VD = np.full((len(ids), D), np.nan, dtype=np.float32)
    counts = (len(ids), 0) if table == 0 else (0, len(ids))
    hit_V = cache.lookup(step, starts(*counts), np.array(ids), out_VD, lease, drift)
    assert np.array_equal(hit_V, ~np.isnan(out_VD).any(axis=1))
    return out_VD[:, 0].tolist()


def test_rows_are_found_by_table_and_id() -> None:
    cache, _ = new_cache()
    assert cache.store(0, starts(2, 1), np.array([4, 9, 4]), rows(1, 2, 3)) == 3
    assert found(cache, 0, [4, 5, 9]) == pytest.approx([1, np.nan, 2], nan_ok=True)
    assert found(cache, 0, [4], table=1) == [3]


def test_a_row_is_good_for_its_lease_and_no_longer_until_it_is_read_again() -> None:
    cache, _ = new_cache()
    cache.store(10, ONE, FOUR, rows(1))
    assert found(cache, 13, [4], lease=3) == [1]
    assert np.isnan(found(cache, 14, [4], lease=3)[0])
    assert np.isnan(found(cache, 11, [4], lease=0)[0])
    assert np.isnan(found(cache, 9, [4], lease=3)[0])  # read after that step: a step trained again
    cache.store(15, ONE, FOUR, rows(2))
    assert found(cache, 18, [4], lease=3) == [2]


def test_a_row_that_moves_fast_is_good_for_less_than_its_lease() -> None:
    """Readings of 100, then as many steps later: 101 of 100 is a speed of 0.01, and 0.05 of drift are 5 steps."""
    cache, _ = new_cache()
    known = {"lease": 100, "drift": 0.05}
    read = partial(cache.store, drift=0.05)
    read(0, ONE, FOUR, rows(100))
    assert found(cache, 1, [4], **known) == [100] and np.isnan(found(cache, 2, [4], **known)[0])  # nothing known yet
    for step in (2, 4, 8):  # it hangs: each time the trust doubles
        read(step, ONE, FOUR, rows(100))
        assert found(cache, step + step, [4], **known) == [100]
        assert np.isnan(found(cache, step + step + 1, [4], **known)[0])
    read(10, ONE, FOUR, rows(102))
    assert found(cache, 15, [4], **known) == [102] and np.isnan(found(cache, 16, [4], **known)[0])
    assert np.isnan(found(cache, 15, [4], lease=4, drift=0.05)[0])
    assert found(cache, 110, [4], lease=100) == [102]  # without a limit


def test_rows_that_stand_still_have_a_speed_also_rows_of_zeros_and_read_twice_in_a_step() -> None:
    cache, _ = new_cache()
    for step in (0, 1):
        cache.store(step, ONE, FOUR, rows(100), 0.05)
    assert found(cache, 3, [4], drift=0.05) == [100]
    assert np.isnan(found(cache, 4, [4], drift=0.05)[0])

    cache, _ = new_cache()
    for step in (0, 0, 2):
        cache.store(step, starts(2, 0), np.array([4, 5]), rows(0, 7), 0.05)
    assert found(cache, 4, [4, 5], lease=9, drift=0.05) == [0, 7]
    assert np.isnan(found(cache, 5, [4, 5], lease=9, drift=0.05)).all()


def test_rows_that_were_used_outlive_others_and_rows_of_one_step_do_not_push_each_other_out() -> None:
    cache, _ = new_cache(4)
    assert cache.store(0, starts(6, 0), np.arange(1, 7), rows(1, 2, 3, 4, 5, 6)) == 4
    assert found(cache, 1, [2, 4]) == [2, 4]
    assert cache.store(1, starts(2, 0), np.array([5, 6]), rows(5, 6)) == 2
    assert found(cache, 1, [1, 2, 3, 4, 5, 6]) == pytest.approx([np.nan, 2, np.nan, 4, 5, 6], nan_ok=True)


def test_a_residual_is_never_pushed_out_by_a_row_but_takes_the_place_of_one() -> None:
    cache, pool = new_cache(4)
    cache.store(0, starts(4, 0), np.array([1, 2, 3, 4]), rows(1, 2, 3, 4))
    ids_V = np.array([11, 12, 13, 14, 15])
    pool.commit(one := pool.select(0, starts(5, 0), ids_V, rows(9, 1, 2, 3, 4), keep=0.2), one.rows_KD)
    assert (one.ids_K.tolist(), one.num_overflow, pool.slots.num_unsent) == ([11], 0, 4)
    assert np.isnan(found(cache, 0, [1, 2, 3, 4])).all()
    assert cache.store(1, starts(2, 0), np.array([1, 12]), rows(1, 7)) == 1
    assert found(cache, 1, [12]) == [7]  # in the slot that the row has anyway
    assert pool.slots.num_unsent == 4


def test_a_sent_row_keeps_its_slot_for_its_cached_values_and_forgetting_rows_leaves_the_residuals() -> None:
    cache, pool = new_cache(2)
    cache.store(0, starts(1, 0), np.array([7]), rows(5))
    pool.commit(pool.select(0, starts(1, 0), np.array([7]), rows(3), keep=1.0), rows(2))
    assert (pool.slots.num_unsent, found(cache, 0, [7])) == (1, [5])
    again = pool.select(1, starts(1, 0), np.array([7]), rows(1), keep=1.0)
    assert again.rows_KD[0, 0] == 2
    pool.commit(again, again.rows_KD)
    assert (pool.slots.num_unsent, found(cache, 1, [7])) == (0, [5])

    pool.commit(one := pool.select(2, starts(2, 0), np.array([7, 8]), rows(1, 9), keep=0.5), one.rows_KD)
    pool.slots.forget_rows()
    assert np.isnan(found(cache, 2, [7, 8])).all()
    assert (pool.slots.num_unsent, pool.slots.state()["ids"].tolist()) == (1, [7])
    assert cache.store(3, starts(2, 0), np.array([5, 6]), rows(5, 6)) == 1


def test_a_rewind_forgets_all_rows_and_brings_back_the_residuals() -> None:
    cache, pool = new_cache(4, history=3)
    made = np.random.default_rng(0)
    states = {}
    for step in range(8):
        ids_V = np.sort(made.permutation(12)[:5])
        cache.store(step, starts(5, 0), ids_V, rows(*ids_V))
        states[step] = pool.slots.state()
        selected = pool.select(step, starts(5, 0), ids_V, made.normal(size=(5, D)).astype(np.float32), keep=0.2)
        cache.store(step, starts(0, 5), ids_V, rows(*ids_V))
        pool.commit(selected, np.round(selected.rows_KD))
    for step in (7, 5):
        pool.slots.rewind(step)
        assert np.isnan(found(cache, step, list(range(12)))).all()
        state = pool.slots.state()
        for name in ("tables", "ids", "counts", "squares", "scores", "rests", "sums", "slots"):
            assert np.array_equal(state[name], states[step][name])
        assert sorted([*state["free"], *state["slots"]]) == [0, 1, 2, 3]
        cache.store(step, starts(2, 0), np.array([1, 2]), rows(1, 2))  # changes after a rewind are undone by the next


def test_ids_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="sorted and unique"):
        new_cache()[0].store(0, starts(2, 0), np.array([2, 1]), rows(1, 2))
