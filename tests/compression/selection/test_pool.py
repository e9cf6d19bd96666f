"""The residual pool with whole rows: every gradient is sent, kept back or counted as lost, at every step, and always in
the same way. Saved pools are taken up bit for bit, or added up for another number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.rows import Rows
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slots import RowSlots, merge
from tests.support.cases import every
from tests.support.codecs import codec_of, there_and_back
from tests.support.pairs import cases_of

D, IDS, T = 4, 40, 3
NO_ROWS = np.zeros(T + 1, dtype=np.int64), np.empty(0, np.int64), np.empty((0, D), np.float32)


def coarse(rows_KD: np.ndarray) -> np.ndarray:
    """A codec that is off by up to half of everything: whole multiples of 8."""
    return (np.round(rows_KD / 8) * 8).astype(np.float32)


CODECS_TRIED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp32": lambda rows_KD: rows_KD,
    "fp16": lambda rows_KD: there_and_back(codec_of("fp16"), rows_KD),
    "coarse": coarse,
}


@dataclasses.dataclass
class Step:
    starts_T1: np.ndarray
    ids_V: np.ndarray
    grad_VD: np.ndarray

    def selected(self, pool: ResidualPool, number: int, **how: Any) -> Selected:
        return pool.select(number, self.starts_T1, self.ids_V, self.grad_VD, **how)


def dense(starts_T1: np.ndarray, ids_V: np.ndarray, rows_VD: np.ndarray) -> np.ndarray:
    """Rows of all tables as one float64 array (T, IDS, D)."""
    out = np.zeros((T, IDS, D))
    tables_V = np.repeat(np.arange(T), np.diff(starts_T1))
    np.add.at(out, (tables_V, ids_V), rows_VD)
    return out


def steps(count: int, seed: int = 0, *, dyadic: bool = True) -> list[Step]:
    """Random steps; dyadic gradients have few enough bits for float32 to add them exactly."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        per_table = [np.sort(rng.permutation(IDS)[: rng.integers(0, 13)]) for _ in range(T)]
        starts_T1 = np.cumsum([0, *(ids.size for ids in per_table)])
        ids_V = np.concatenate(per_table).astype(np.int64)
        grad_VD = rng.normal(size=(ids_V.size, D)) * rng.lognormal(0, 1.5, size=(ids_V.size, 1))
        grad_VD = np.round(grad_VD * 64) / 64 if dyadic else grad_VD
        made.append(Step(starts_T1, ids_V, grad_VD.astype(np.float32)))
    return made


def new_pool(capacity: int = 200, *, dim: int = D, history: int = 0) -> ResidualPool:
    slots = RowSlots(width=dim, capacity=capacity, history=history)
    return ResidualPool(Rows(), slots, dim=dim, keys_T=np.arange(T, dtype=np.uint64))


def residuals(pool: ResidualPool) -> np.ndarray:
    state = pool.slots.state()
    out = np.zeros((T, IDS, D))
    out[state["tables"], state["ids"]] = state["rests"]
    return out


def sent_rows(selected: Selected) -> Iterator[tuple[int, int]]:
    for t in range(T):
        for at in range(selected.starts_T1[t], selected.starts_T1[t + 1]):
            yield t, int(selected.ids_K[at])


def same(left: Selected, right: Selected) -> bool:
    names = [field.name for field in dataclasses.fields(Selected)]
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def same_state(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@every(("keep", "capacity", "codec"), [
    (float(case["keep"]), int(case["capacity"]), case["codec"])
    for case in cases_of({
        "keep": ["1e-9", "0.2", "1.0"], "capacity": ["1", "9", "30", "120"], "codec": [*CODECS_TRIED],
    })
])  # fmt: skip
def test_delivered_and_residual_and_lost_are_all_that_came_in(keep: float, capacity: int, codec: str) -> None:
    pool = new_pool(capacity)
    came = delivered = lost = np.zeros((T, IDS, D))
    lost_rows, lost_squares = 0, 0.0
    for number, step in enumerate(steps(30)):
        kept = residuals(pool) + dense(step.starts_T1, step.ids_V, step.grad_VD)
        selected = step.selected(pool, number, keep=keep)
        decoded_KD = CODECS_TRIED[codec](selected.rows_KD)
        sent = list(sent_rows(selected))
        assert sent == sorted(set(sent)) and len(sent) == num_kept(step.ids_V.size, keep) + selected.num_overflow
        for t, id_ in sent:
            kept[t, id_] = 0
        pool.commit(selected, decoded_KD)
        error = dense(selected.starts_T1, selected.ids_K, selected.rows_KD.astype(np.float64) - decoded_KD)
        gone = kept + error - residuals(pool)  # rounding errors, of sent rows or of rows that gave their slot away
        lost_rows += int((gone != 0).any(axis=2).sum())
        lost_squares += (gone**2).sum()
        lost = lost + gone
        came = came + dense(step.starts_T1, step.ids_V, step.grad_VD)
        delivered = delivered + dense(selected.starts_T1, selected.ids_K, decoded_KD)
        assert np.array_equal(delivered + residuals(pool) + lost, came)
        assert pool.slots.num_unsent == (residuals(pool) != 0).any(axis=2).sum() <= capacity
    assert (pool.slots.lost_rows, pool.slots.lost_squares) == (lost_rows, pytest.approx(lost_squares))
    if capacity == T * IDS or codec == "fp32":
        assert pool.slots.lost_rows == pool.slots.lost_squares == 0
    assert pool.slots.unsent_norm(D) == pytest.approx(np.linalg.norm(residuals(pool)))
    last = pool.select(30, *NO_ROWS, keep=1.0, flush=True)
    pool.commit(last, last.rows_KD)
    delivered = delivered + dense(last.starts_T1, last.ids_K, last.rows_KD)
    assert np.array_equal(delivered + residuals(pool) + lost, came)
    assert pool.slots.num_unsent == 0 or codec != "fp32"  # rounding errors stay


def test_with_enough_slots_it_does_what_the_plain_algorithm_does() -> None:
    pool = new_pool(T * IDS)
    rest, squares = np.zeros((T, IDS, D), np.float32), np.zeros((T, IDS), np.float32)
    for number, step in enumerate(steps(40, seed=2)):
        tables_V = np.repeat(np.arange(T), np.diff(step.starts_T1))
        rest[tables_V, step.ids_V] += step.grad_VD
        squares[tables_V, step.ids_V] += (step.grad_VD.astype(np.float64) ** 2).mean(axis=1).astype(np.float32)
        norms = np.sqrt((rest[tables_V, step.ids_V].astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)
        chosen = np.argsort(-norms, kind="stable")[: num_kept(norms.size, 0.3)]
        expected = {(int(tables_V[v]), int(step.ids_V[v])) for v in chosen}
        selected = step.selected(pool, number, keep=0.3)
        assert list(sent_rows(selected)) == sorted(expected)
        for at, (t, id_) in enumerate(sent_rows(selected)):
            assert np.array_equal(selected.rows_KD[at], rest[t, id_])
            assert selected.squares_K[at] == pytest.approx(squares[t, id_], rel=1e-5)
            rest[t, id_], squares[t, id_] = 0, 0
        pool.commit(selected, selected.rows_KD)
        assert np.array_equal(residuals(pool), rest)


def column(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, dtype=np.float32)[:, None], D, axis=1)


def send(
    pool: ResidualPool,
    step: int,
    rows: dict[int, float],
    *,
    keep: float,
    flush: bool = False,
    decoded: float | None = None,
) -> Selected:
    """Selects of rows of the first table, each of one value, and commits those, or one value instead."""
    starts_T1 = np.array([0, *[len(rows)] * T])
    ids_V = np.array(list(rows), dtype=np.int64)
    selected = pool.select(step, starts_T1, ids_V, column(*rows.values()), keep=keep, flush=flush)
    pool.commit(selected, selected.rows_KD if decoded is None else np.full_like(selected.rows_KD, decoded))
    return selected


def test_a_share_that_rounds_to_none_is_a_row_ties_go_to_the_first_and_no_rows_are_fine() -> None:
    pool = new_pool()
    assert send(pool, 0, {0: -1, 1: 1, 2: -1, 3: 1}, keep=1e-9).ids_K.tolist() == [0]
    assert send(pool, 1, dict.fromkeys(range(10, 14), 0), keep=0.5).ids_K.tolist() == [10, 11]
    assert pool.slots.num_unsent == 3  # a gradient of zeros takes no slot

    empty = send(pool, 2, {}, keep=0.5)
    assert (empty.ids_K.size, empty.starts_T1.tolist(), empty.rows_KD.shape) == (0, [0] * (T + 1), (0, D))
    one = pool.select(3, np.array([0, 0, 0, 1]), np.array([-(2**63)]), column(2), keep=0.5)
    assert (one.starts_T1.tolist(), one.ids_K.tolist()) == ([0, 0, 0, 1], [-(2**63)])


@every("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_row_that_is_not_finite_is_left_out_counted_and_never_touches_its_residual(bad: float) -> None:
    pool = new_pool()
    send(pool, 0, {4: 3, 5: 2, 6: 1}, keep=0.3)
    grad_VD = column(1, 1, 1)
    grad_VD[[1, 0], [2, 1]] = bad
    second = pool.select(1, np.array([0, 3, 3, 3]), np.array([4, 5, 6]), grad_VD, keep=1.0)
    assert (second.num_bad, second.ids_K.tolist()) == (2, [6])
    pool.commit(second, second.rows_KD)
    assert residuals(pool)[0, 5].tolist() == [2.0] * D
    assert residuals(pool)[0, 4].tolist() == [0.0] * D


def test_a_sum_that_overflows_and_a_decoded_row_that_is_not_finite_are_counted() -> None:
    pool = new_pool()
    send(pool, 0, {1: 3e38, 2: 2e38}, keep=0.5)
    second = send(pool, 1, {1: 1, 2: 3e38}, keep=1.0)
    assert (second.num_bad, second.ids_K.tolist()) == (1, [1])
    assert np.isfinite(second.squares_K).all()
    assert residuals(pool)[0, 2].tolist() == column(2e38)[0].tolist()

    pool = new_pool()
    send(pool, 0, {1: 1}, keep=1.0, decoded=np.inf)
    assert (pool.slots.num_unsent, pool.slots.lost_rows, pool.slots.lost_squares) == (0, 1, np.inf)


def test_a_flush_sends_every_gradient_that_waits_and_no_rounding_error() -> None:
    pool = new_pool()
    send(pool, 0, {id_: id_ + 1 for id_ in range(20)}, keep=0.05)
    assert send(pool, 1, {}, keep=0.5).ids_K.size == 0
    assert send(pool, 2, {4: 9}, keep=1.0, flush=True).ids_K.tolist() == list(range(19))
    assert pool.slots.num_unsent == 0

    pool = new_pool()
    send(pool, 0, {1: 3}, keep=1.0, decoded=1)
    assert send(pool, 1, {}, keep=1.0, flush=True).ids_K.size == 0
    assert residuals(pool)[0, 1].tolist() == [2.0] * D
    assert send(pool, 2, {1: 1}, keep=1.0).squares_K.tolist() == [1.0]  # those of the 3 were sent


def test_who_gets_a_slot_when_there_are_too_few() -> None:
    pool = new_pool(2)  # of a new row and the least residual the smaller one is sent
    send(pool, 0, {1: 9, 2: 2, 3: 4}, keep=0.1)
    weak = send(pool, 1, {4: 9, 5: 1, 6: 1.5}, keep=0.1)
    assert (weak.ids_K.tolist(), weak.num_overflow) == ([4, 5, 6], 2)
    strong = send(pool, 2, {7: 9, 8: 3}, keep=0.1)
    assert (strong.ids_K.tolist(), strong.num_overflow) == ([2, 7], 1)
    assert strong.rows_KD[:, 0].tolist() == [2, 9]
    assert sorted(pool.slots.state()["ids"].tolist()) == [3, 8]

    pool = new_pool(1)  # a residual of this step's rows is never given away
    send(pool, 0, {1: 9, 2: 1}, keep=0.1)
    assert send(pool, 1, {1: 5, 2: 1, 3: 3}, keep=0.1).ids_K.tolist() == [1, 3]
    assert residuals(pool)[0, 2, 0] == 2.0

    pool = new_pool(1)  # a rounding error is lost
    send(pool, 0, {1: 3}, keep=1.0, decoded=2.5)
    selected = send(pool, 1, {2: 9, 3: 1}, keep=0.1)
    assert (selected.ids_K.tolist(), pool.slots.lost_rows, pool.slots.lost_squares) == ([2], 1, 0.25 * D)


@every("capacity", [5, 40, 200])
def test_a_run_again_after_a_rewind_and_in_a_loaded_pool_gives_the_same_bits(capacity: int) -> None:
    pool = new_pool(capacity, history=6)
    made = steps(30, seed=5, dyadic=False)
    seen: dict[int, Selected] = {}
    states: dict[int, dict[str, np.ndarray]] = {}

    def run(pool: ResidualPool, begin: int, end: int) -> None:
        for number in range(begin, end):
            before = pool.slots.state()
            assert sorted([*before["slots"], *before["free"]]) == list(range(capacity))
            selected = made[number].selected(pool, number, keep=0.2)
            pool.commit(selected, coarse(selected.rows_KD))
            assert same(selected, seen.setdefault(number, selected))
            assert same_state(before, states.setdefault(number, before))

    run(pool, 0, 20)
    pool.slots.rewind(15)
    run(pool, 15, 17)
    pool.slots.rewind(16)
    pool.slots.rewind(14)
    assert same_state(pool.slots.state(), states[14])
    run(pool, 14, 25)
    pool.slots.rewind(25)
    pool.slots.rewind(20)
    run(pool, 20, 23)
    pool.slots.rewind(22)
    run(pool, 22, 24)
    loaded = new_pool(capacity, history=6)
    loaded.slots.load(pool.slots.state())
    for name in ("num_unsent", "lost_rows", "lost_squares"):
        assert getattr(loaded.slots, name) == getattr(pool.slots, name)
    run(pool, 24, 30)
    run(loaded, 24, 30)  # the states that are compared are copies, which the other one did not change
    loaded.slots.load(pool.slots.state())
    with pytest.raises(KeyError, match="kept: none"):
        loaded.slots.rewind(29)


def test_a_rewind_forgets_an_open_selection_and_refuses_steps_too_old() -> None:
    pool = new_pool(history=2)
    made = steps(6)
    for number, step in enumerate(made[:5]):
        selected = step.selected(pool, number, keep=0.2)
        if number < 4:
            pool.commit(selected, coarse(selected.rows_KD))
    with pytest.raises(KeyError, match=r"step 2 is no longer kept \(kept: 3 to 4\)"):
        pool.slots.rewind(2)
    pool.slots.rewind(4)
    assert same(made[4].selected(pool, 4, keep=0.2), selected)


@every(
    ("change", "message"),
    [
        ({"ids_V": np.array([2, 2, 1])}, "id 2 at position 1 follows 2; ids are sorted and unique"),
        ({"ids_V": np.array([2, 5, 1])}, "id 1 at position 2 follows 5"),
        ({"ids_V": np.array([1, 2, 3], dtype=np.int32)}, "ids of int32"),
        ({"starts_T1": np.array([0, 3, 3])}, "starts of int64"),
        ({"starts_T1": np.array([0, 3, 2, 3])}, "do not split 3 ids"),
        ({"starts_T1": np.array([0, 3, 3, 4])}, "do not split 3 ids"),
        ({"grad_VD": np.zeros((3, D + 1), np.float32)}, "rows of float32"),
        ({"grad_VD": np.zeros((3, D))}, "rows of float64"),
        ({"keep": 0.0}, "keep: 0.0; allowed"),
        ({"step": 4}, "step 4 after step 4"),
    ],
)
def test_wrong_inputs_and_calls_are_refused_before_anything_changes(change: dict[str, Any], message: str) -> None:
    pool = new_pool(history=2)
    selected = steps(1)[0].selected(pool, 4, keep=0.2)
    for call in (lambda: pool.select(5, *NO_ROWS, keep=0.5), pool.slots.state):
        with pytest.raises(ValueError, match="not committed"):
            call()
    with pytest.raises(ValueError, match="sent rows of"):
        pool.commit(selected, selected.rows_KD[1:])
    pool.commit(selected, selected.rows_KD)
    with pytest.raises(ValueError, match="once"):
        pool.commit(selected, selected.rows_KD)
    before = pool.slots.state()
    good = {"step": 5, "starts_T1": np.array([0, 3, 3, 3]), "ids_V": np.arange(3), "grad_VD": column(1, 2, 3)}
    with pytest.raises(ValueError, match=message):
        pool.select(**(good | {"keep": 0.5} | change))
    assert same_state(pool.slots.state(), before)


# ---- saved pools ----


def trained(pool: ResidualPool, count: int, seed: int = 0) -> ResidualPool:
    for number, step in enumerate(steps(count, seed, dyadic=False)):
        selected = step.selected(pool, number, keep=0.2)
        pool.commit(selected, np.round(selected.rows_KD, 1))
    return pool


def test_a_state_fits_a_pool_of_another_size_if_its_rows_do() -> None:
    pool, larger, smaller = trained(new_pool(20), 10), new_pool(100), trained(new_pool(2), 3)
    larger.slots.load(pool.slots.state())
    assert np.array_equal(residuals(larger), residuals(pool))
    assert larger.slots.unsent_norm(D) == pool.slots.unsent_norm(D)
    before = residuals(smaller)
    with pytest.raises(ValueError, match=r"do not fit 2 slots; raise pool_rows"):
        smaller.slots.load(pool.slots.state())
    assert np.array_equal(residuals(smaller), before)
    other = new_pool(99, dim=D + 1)
    with pytest.raises(ValueError, match="a state of residuals"):
        other.slots.load(pool.slots.state())
    with pytest.raises(ValueError, match="one dim"):
        merge([pool.slots.state(), other.slots.state()])
    with pytest.raises(ValueError, match="0 states"):
        merge([])


def test_merged_states_add_up_by_table_and_id() -> None:
    pools = [trained(new_pool(30), 6 + worker, seed=worker) for worker in range(3)]
    states = [pool.slots.state() for pool in pools]
    merged, one = merge(states), new_pool()
    one.slots.load(merged)
    assert np.abs(residuals(one) - sum(map(residuals, pools))).max() < 1e-6
    keys = list(zip(merged["tables"].tolist(), merged["ids"].tolist(), strict=True))
    assert keys == sorted(set(keys)) and one.slots.num_unsent == len(keys)
    for name in ("squares", "counts"):
        assert merged[name].sum() == pytest.approx(sum(state[name].sum() for state in states))
    assert (merged["scores"] >= np.linalg.norm(merged["rests"], axis=1) * 0.999999).all()
    assert one.slots.lost_rows == sum(pool.slots.lost_rows for pool in pools)
    assert one.slots.lost_squares == pytest.approx(sum(pool.slots.lost_squares for pool in pools))
    one.commit(last := one.select(12, *NO_ROWS, keep=1.0, flush=True), last.rows_KD)
