"""Single values with residual and DGC: the plain recurrence, clipping, and rows without a slot."""

from __future__ import annotations

import numpy as np

from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.selector import Selector
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slots import RowSlots
from shardkeep.compression.selection.top_k import TopK
from shardkeep.examples.compression.dgc import Dgc
from tests.support.cases import every

D, T, IDS = 3, 2, 12
EVERY_ROW = np.array([0, IDS, 2 * IDS]), np.tile(np.arange(IDS), T)


def new_pool(capacity: int = 100, selector: Selector | None = None) -> ResidualPool:
    selector = selector or TopK()
    slots = RowSlots(width=selector.state_values(D), capacity=capacity, history=0)
    return ResidualPool(selector, slots, dim=D, keys_T=np.arange(T, dtype=np.uint64), num_workers=4)


def of_one_table(pool: ResidualPool, step: int, grads: dict[int, list[float]], *, keep: float) -> Selected:
    rows_VD = np.array(list(grads.values()), np.float32)
    selected = pool.select(step, np.array([0, len(grads), len(grads)]), np.array(list(grads)), rows_VD, keep=keep)
    pool.commit(selected, selected.rows_KD)
    return selected


def dense(starts_T1: np.ndarray, ids_V: np.ndarray, rows_VD: np.ndarray) -> np.ndarray:
    out = np.zeros((T, IDS, D))
    out[np.repeat(np.arange(T), np.diff(starts_T1)), ids_V] = rows_VD
    return out


def residuals(pool: ResidualPool) -> np.ndarray:
    state = pool.slots.state()
    out = np.zeros((T, IDS, D))
    out[state["tables"], state["ids"]] = state["rests"][:, :D]
    return out


@every("masking", [True, False])
@every("nesterov", [True, False])
def test_dgc_does_what_the_plain_recurrence_does(nesterov: bool, masking: bool) -> None:
    dgc = Dgc(momentum=0.75, nesterov=nesterov, masking=masking)
    pool, rng = new_pool(selector=dgc), np.random.default_rng(1)
    u, v = np.zeros((T, IDS, D), np.float32), np.zeros((T, IDS, D), np.float32)
    mu = np.float32(0.75)
    for step in range(25):
        grad = rng.normal(size=(T, IDS, D)).astype(np.float32)
        u = mu * (u + grad) if nesterov else mu * u + grad
        v = v + u + grad if nesterov else v + u
        mask = np.zeros((T, IDS, D), bool)
        for t in range(T):
            order = np.argsort(-np.abs(v[t]).reshape(-1), kind="stable")
            mask[t].reshape(-1)[order[: num_kept(IDS * D, 0.1)]] = True
        selected = pool.select(step, *EVERY_ROW, grad.reshape(-1, D), keep=0.1)
        assert np.array_equal(dense(selected.starts_T1, selected.ids_K, selected.rows_KD), np.where(mask, v, 0))
        assert int((selected.rows_KD != 0).sum()) == 2 * num_kept(IDS * D, 0.1)
        pool.commit(selected, selected.rows_KD)
        v[mask] = 0
        if masking:
            u[mask] = 0
        state = pool.slots.state()
        assert np.array_equal(state["rests"].reshape(T, IDS, 2, D), np.stack([v, u], axis=2))


def test_a_gradient_is_clipped_to_its_share_of_the_norm_before_it_is_added() -> None:
    pool = new_pool(selector=Dgc(momentum=0.0, clip_norm=10.0))
    selected = of_one_table(pool, 0, {1: [6, 0, 0], 2: [0, -8, 0], 3: [np.inf, 0, 0]}, keep=1.0)
    assert selected.rows_KD.tolist() == [[3, 0, 0], [0, -4, 0]]  # 10 / sqrt(4) of a norm of 10
    assert selected.num_bad == 1
    assert of_one_table(pool, 1, {1: [1, 0, 0]}, keep=1.0).rows_KD.tolist() == [[1, 0, 0]]


def test_elements_are_chosen_for_each_table_and_zeros_never() -> None:
    pool = new_pool()
    grad_VD = np.array([[100, 90, -80], [0, -0.0, 0], [1, 0, 0]], np.float32)
    selected = pool.select(0, np.array([0, 1, 3]), np.array([5, 5, 6]), grad_VD, keep=0.5)
    assert (selected.starts_T1.tolist(), selected.ids_K.tolist()) == ([0, 1, 2], [5, 6])
    assert selected.rows_KD.tolist() == [[100, 90, 0], [1, 0, 0]]
    pool.commit(selected, selected.rows_KD)
    assert residuals(pool)[0, 5].tolist() == [0, 0, -80]
    assert pool.slots.num_unsent == 1


def test_a_row_without_a_slot_or_that_loses_it_is_sent_whole() -> None:
    pool = new_pool(1)
    of_one_table(pool, 0, {4: [5, 2, 0]}, keep=0.1)
    weak = of_one_table(pool, 1, {6: [1, -1, 0]}, keep=0.1)
    assert (weak.ids_K.tolist(), weak.rows_KD.tolist(), weak.num_overflow) == ([6], [[1, -1, 0]], 1)
    strong = of_one_table(pool, 2, {2: [9, 8, 0]}, keep=0.1)
    assert (strong.ids_K.tolist(), strong.rows_KD.tolist()) == ([2, 4], [[9, 0, 0], [0, 2, 0]])
    assert strong.num_overflow == 1

    pool = new_pool(1)  # a gradient that waits comes before a rounding error
    grad_VD = np.array([[9.4, 0, 0], [9, 5, 0]], np.float32)
    part = pool.select(0, np.array([0, 2, 2]), np.array([1, 2]), grad_VD, keep=0.3)
    pool.commit(part, np.round(part.rows_KD))
    assert part.rows_KD.tolist() == [[np.float32(9.4), 0, 0], [9, 0, 0]]
    assert residuals(pool)[0, 2].tolist() == [0, 5, 0] and pool.slots.lost_rows == 1
