"""Checks of a selector of your own: that it is pure, and that the state that the pool keeps for it is all it needs."""
# T = tables, V = rows of a step, K = sent rows, W = values of a row's state, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.base.errors import UserError
from shardkeep.compression.selection.checked import CheckedSelector
from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.selector import Selector, Step
from shardkeep.compression.selection.slots import RowSlots, merge

_D, _T, _IDS, _STEPS = 4, 2, 60, 12
_Rows = tuple[Ints, Ints, Floats]


def check_selector(selector: Selector, *, keep: float = 0.25, obeys_keep: bool = True, conserves: bool = False) -> None:
    """Raises AssertionError, in one line, for a selector that does not do what `Selector` states.

    It is run over 12 steps of two tables of dim 4: with and without rows, with rows that are not finite, with a place
    for every row and with few, in two workers; again from the start, after a rewind and from a checkpoint. A selector
    never sees how many servers there are, so that is not checked.

    Args:
        keep: The share.
        obeys_keep: Whether it sends no more than the share, random selectors on the mean.
        conserves: Whether sum(sent) + sum(residuals) = sum(gradients). Always checked of a selector that inherits
            `accumulate` and `settle`."""
    name = type(selector).__name__
    try:
        _check(_Watched(selector, name), name, keep, obeys_keep, conserves or _is_plain(selector))
    except UserError as error:
        raise AssertionError(str(error)) from error


class _Watched(CheckedSelector):
    """Also refuses changes of what a method may only read."""

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        before = grad_VD.tobytes()
        values_VD = super().accumulate(step, state_VW, grad_VD)
        _require(grad_VD.tobytes() == before, f"{self._name}: accumulate changed the gradients; it may change state_VW")
        return values_VD

    def choose(self, step: Step, values_VD: Floats) -> Any:
        before = values_VD.tobytes()
        chosen = super().choose(step, values_VD)
        _require(values_VD.tobytes() == before, f"{self._name}: choose changed the values; it may only read them")
        return chosen


def _require(fine: Any, text: str) -> None:
    if not fine:
        raise AssertionError(text)


def _is_plain(selector: Selector) -> bool:
    kind = type(selector)
    return all(getattr(kind, each, None) is getattr(Selector, each) for each in ("accumulate", "settle"))


def _check(selector: Selector, name: str, keep: float, obeys_keep: bool, conserves: bool) -> None:
    for capacity in (_T * _IDS, 7):
        pool, seen = _pool(selector, capacity), [b""] * _STEPS
        for step, selected in _run(pool, range(_STEPS), keep):
            seen[step] = _bits(selected)
        for what, again, start in (
            ("the same calls give", _pool(selector, capacity), 0),
            ("steps after a rewind give", pool, _STEPS - 4),
            ("steps after a checkpoint give", _pool(selector, capacity), _STEPS // 2),
        ):
            if again is pool:
                pool.slots.rewind(start)
            elif start:
                before = _pool(selector, capacity)
                _finish(before, range(start), keep)
                again.slots.load(before.slots.state())
            for step, selected in _run(again, range(start, _STEPS), keep):
                assert _bits(selected) == seen[step], (
                    f"{name}: {what} other bits in step {step}; it has state of its own"
                )
    _check_share(selector, name, keep, obeys_keep)
    _check_sums(selector, name, keep, conserves)
    _check_odd_rows(selector, name, keep)


def _check_share(selector: Selector, name: str, keep: float, obeys_keep: bool) -> None:
    sent = total = 0
    for step, selected in _run(_pool(selector, _T * _IDS), range(_STEPS), keep):
        rows = _rows(step)[2]
        by_rows = selector.sends == "rows"
        sent += len(selected.ids_K) if by_rows else int(np.count_nonzero(selected.rows_KD))
        total += len(rows) if by_rows else rows.size
    limit = 1.25 * keep * total + _T * _STEPS
    _require(not obeys_keep or sent <= limit, f"{name}: sent {sent} of {total} {selector.sends} with keep {keep:g}")


def _check_sums(selector: Selector, name: str, keep: float, conserves: bool) -> None:
    """Of two workers whose states become one."""
    sums, pools = np.zeros((_T, _IDS, _D)), [_pool(selector, _T * _IDS) for _ in range(2)]
    for rank, pool in enumerate(pools):
        for step, selected in _run(pool, range(_STEPS), keep, rank):
            sums += _dense(*_rows(step, rank)) - _dense(selected.starts_T1, selected.ids_K, _decoded(selected.rows_KD))
    one = _pool(selector, _T * _IDS)
    one.slots.load(state := merge([pool.slots.state() for pool in pools]))
    sums[state["tables"], state["ids"]] -= state["rests"][:, :_D]
    lost = np.abs(sums).max()
    _require(not conserves or lost < 1e-4, f"{name}: sent + residuals differ from the sum of gradients by {lost:.3g}")
    _finish(one, range(_STEPS, _STEPS + 1), keep)


def _check_odd_rows(selector: Selector, name: str, keep: float) -> None:
    pool = _pool(selector, _T * _IDS)
    starts_T1, ids_V, grad_VD = _rows(0)
    pool.commit(first := pool.select(0, starts_T1, ids_V, grad_VD, keep=keep), first.rows_KD)
    before = pool.slots.state()["rests"]
    bad = pool.select(1, starts_T1, ids_V, np.full_like(grad_VD, np.nan), keep=1.0)
    _require(not bad.ids_K.size, f"{name}: sent {bad.ids_K.size} rows of NaN")
    pool.commit(bad, bad.rows_KD)
    _require(np.array_equal(pool.slots.state()["rests"], before), f"{name}: a row of NaN changed a state")
    last = pool.select(2, starts_T1, ids_V, grad_VD, keep=keep, flush=True)
    _require(np.isfinite(last.rows_KD).all(), f"{name}: sent a row that is not finite, after a row of NaN")


def _pool(selector: Selector, capacity: int) -> ResidualPool:
    slots = RowSlots(width=selector.state_values(_D), capacity=capacity, history=_STEPS)
    return ResidualPool(selector, slots, dim=_D, keys_T=np.arange(1, _T + 1, dtype=np.uint64), num_workers=2)


def _rows(step: int, rank: int = 0) -> _Rows:
    """Gradients of different sizes, which float32 adds exactly. Every fifth step has no rows."""
    rng = np.random.default_rng([step, rank])
    per_table = [np.sort(rng.permutation(_IDS)[: 0 if step % 5 == 4 else 30]) for _ in range(_T)]
    ids_V = np.concatenate(per_table).astype(np.int64)
    grad_VD = np.round(rng.normal(size=(ids_V.size, _D)) * rng.lognormal(0, 1, size=(ids_V.size, 1)) * 64) / 64
    return np.cumsum([0, *map(len, per_table)]), ids_V, grad_VD.astype(np.float32)


def _run(pool: ResidualPool, steps: Sequence[int], keep: float, rank: int = 0) -> Iterator[tuple[int, Selected]]:
    for step in steps:
        yield step, (selected := pool.select(step, *_rows(step, rank), keep=keep))
        pool.commit(selected, _decoded(selected.rows_KD))


def _finish(pool: ResidualPool, steps: Sequence[int], keep: float) -> None:
    for _ in _run(pool, steps, keep):
        pass


def _decoded(rows_KD: Floats) -> Floats:
    """Of a coarse number format."""
    return np.round(rows_KD * 8).astype(np.float32) / np.float32(8)


def _dense(starts_T1: Ints, ids_V: Ints, rows_VD: Floats) -> Float64s:
    out = np.zeros((_T, _IDS, _D))
    out[np.repeat(np.arange(_T), np.diff(starts_T1)), ids_V] = rows_VD
    return out


def _bits(selected: Selected) -> bytes:
    return b"".join(array.tobytes() for array in (selected.starts_T1, selected.ids_K, selected.rows_KD))
