"""Saved row pools: taken up bit for bit, or added up for another number of workers."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.compression.selection.row_pool import RowPool
from shardkeep.compression.selection.slots import State, merge
from tests.support.cases import every

D, TABLES, IDS = 5, 2, 60


def split(state: State, parts: int) -> list[dict[str, np.ndarray]]:
    """The rows dealt out one by one to `parts` workers; the totals go to the first. `merge` undoes it."""
    by_row = ("tables", "ids", "counts", "firsts", "squares", "scores", "rests")
    dealt = [{name: state[name][part::parts] for name in by_row} for part in range(parts)]
    step = np.array([state["control"][0], 0], dtype=np.int64)
    for part, one in enumerate(dealt):
        one["sums"] = state["sums"] if part == 0 else np.zeros(len(state["sums"]))
        one["control"] = state["control"] if part == 0 else step
    return dealt


def new_pool(capacity: int = 30) -> RowPool:
    return RowPool(num_tables=TABLES, dim=D, capacity=capacity, cache=False, history=2)


def train(pool: RowPool, begin: int, end: int, seed: int = 0) -> list[np.ndarray]:
    """Steps begin..end - 1 with inputs named by step and seed; the rows and ids that were sent."""
    sent = []
    for step in range(begin, end):
        rng = np.random.default_rng((seed, step))
        per_table = [np.sort(rng.permutation(IDS)[: rng.integers(0, 20)]) for _ in range(TABLES)]
        starts_T1 = np.cumsum([0, *(ids.size for ids in per_table)])
        grad_VD = rng.normal(size=(int(starts_T1[-1]), D)).astype(np.float32)
        selected = pool.select(step, starts_T1, np.concatenate(per_table), grad_VD, keep=0.2, max_age=9)
        pool.commit(selected, np.round(selected.rows_KD, 1))
        sent += [selected.starts_T1, selected.ids_K, selected.rows_KD, selected.squares_K]
    return sent


def total(state: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros((TABLES, IDS, D))
    np.add.at(out, (state["tables"], state["ids"]), state["rests"])
    return out


@every("capacity", [7, 30, 200])
def test_a_loaded_pool_goes_on_bit_for_bit(capacity: int) -> None:
    straight, resumed = new_pool(capacity), new_pool(capacity)
    train(straight, 0, 12)
    resumed.slots.load({name: array.copy() for name, array in straight.slots.state().items()})
    assert (resumed.slots.num_unsent, resumed.slots.unsent_norm(D)) == (
        straight.slots.num_unsent,
        straight.slots.unsent_norm(D),
    )
    assert resumed.slots.lost_squares == straight.slots.lost_squares
    later = zip(train(straight, 12, 25), train(resumed, 12, 25), strict=True)
    assert all(np.array_equal(one, other) for one, other in later)
    assert np.array_equal(resumed.slots.sums[1:], straight.slots.sums[1:])


def test_a_state_names_every_slot_once_as_held_or_free() -> None:
    pool = new_pool()
    for begin in range(0, 12, 3):
        state = pool.slots.state()
        assert sorted([*state["slots"], *state["free"]]) == list(range(30))
        train(pool, begin, begin + 3)


def test_a_state_is_a_copy() -> None:
    pool = new_pool()
    train(pool, 0, 5)
    state = pool.slots.state()
    before = {name: array.copy() for name, array in state.items()}
    train(pool, 5, 10)
    assert all(np.array_equal(state[name], before[name]) for name in state)


def test_a_state_fits_a_pool_of_another_size_if_its_rows_do() -> None:
    pool, larger = new_pool(20), new_pool(100)
    train(pool, 0, 10)
    larger.slots.load(pool.slots.state())
    assert np.array_equal(total(larger.slots.state()), total(pool.slots.state()))
    train(larger, 10, 15)
    smaller = new_pool(2)
    train(smaller, 0, 3)
    before = smaller.slots.state()
    with pytest.raises(ValueError, match=r"do not fit 2 slots; raise pool_rows"):
        smaller.slots.load(pool.slots.state())
    assert np.array_equal(total(smaller.slots.state()), total(before))
    with pytest.raises(ValueError, match="a state of residuals"):
        RowPool(num_tables=1, dim=D + 1, capacity=99, cache=False, history=0).slots.load(pool.slots.state())


def test_a_load_forgets_the_steps_before() -> None:
    pool = new_pool()
    train(pool, 0, 5)
    pool.slots.load(pool.slots.state())
    with pytest.raises(KeyError, match="kept: none"):
        pool.slots.rewind(4)
    train(pool, 5, 6)
    pool.slots.rewind(5)


def test_merged_states_add_up_by_table_and_id() -> None:
    pools = [new_pool() for _ in range(3)]
    for worker, pool in enumerate(pools):
        train(pool, 0, 10 + worker, seed=worker)
    states = [pool.slots.state() for pool in pools]
    merged = merge(states)
    assert np.abs(total(merged) - sum(total(state) for state in states)).max() < 1e-6
    keys = list(zip(merged["tables"].tolist(), merged["ids"].tolist(), strict=True))
    assert keys == sorted(set(keys))
    for name in ("squares", "counts"):
        assert merged[name].sum() == pytest.approx(sum(state[name].sum() for state in states))
    oldest = min(int(state["firsts"][state["firsts"] >= 0].min()) for state in states)
    assert merged["firsts"][merged["firsts"] >= 0].min() == oldest
    assert (merged["scores"] >= np.linalg.norm(merged["rests"], axis=1) * 0.999999).all()
    one = new_pool(200)
    one.slots.load(merged)
    assert one.slots.num_unsent == len(keys)
    assert one.slots.lost_rows == sum(pool.slots.lost_rows for pool in pools)
    assert one.slots.sums[1:].sum() == pytest.approx(sum(pool.slots.sums[1:].sum() for pool in pools))
    train(one, 12, 15)


@every("workers", [1, 2, 5])
def test_dealt_out_rows_are_all_there_and_once(workers: int) -> None:
    pool = new_pool()
    train(pool, 0, 10)
    dealt = split(merge([pool.slots.state()]), workers)
    again = merge(dealt)
    assert np.array_equal(total(again), total(pool.slots.state()))
    assert np.array_equal(again["sums"], pool.slots.state()["sums"])
    sizes = [one["ids"].size for one in dealt]
    assert max(sizes) - min(sizes) <= 1
    for one in dealt:
        new_pool().slots.load(one)


def test_states_of_different_dims_cannot_be_added() -> None:
    other = RowPool(num_tables=1, dim=2, capacity=3, cache=False, history=0)
    with pytest.raises(ValueError, match="one dim"):
        merge([new_pool().slots.state(), other.slots.state()])
    with pytest.raises(ValueError, match="0 states"):
        merge([])
