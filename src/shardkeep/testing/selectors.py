"""check_selector: whether a selector of your own is pure, so that the state which the pool keeps is all it needs."""
# T = tables, V = rows of a step, K = sent rows, D = embedding dim

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.compression.selection.checked import CheckedSelector
from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.selector import Selector
from shardkeep.compression.selection.slots import RowSlots, merge
from shardkeep.testing.trial import Trial

_D, _T, _IDS, _STEPS = 4, 2, 60, 12


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
    check, kind = _Check(Trial(lambda: selector, type(selector).__name__, Selector), keep), type(selector)
    for capacity in (_T * _IDS, 7):
        check.repeats(capacity)
    check.share(obeys_keep)
    plain = all(getattr(kind, each, None) is getattr(Selector, each) for each in ("accumulate", "settle"))
    check.sums(conserves or plain)
    check.odd_rows()


class _Check:
    def __init__(self, trial: Trial, keep: float) -> None:
        self._trial, self._selector, self._keep = trial, CheckedSelector(trial), keep

    def _pool(self, capacity: int = _T * _IDS) -> ResidualPool:
        slots = RowSlots(width=self._selector.state_values(_D), capacity=capacity, history=_STEPS)
        return ResidualPool(self._selector, slots, dim=_D, keys_T=np.arange(1, _T + 1, dtype=np.uint64), num_workers=2)

    def _run(self, pool: ResidualPool, steps: Sequence[int], rank: int = 0) -> list[Selected]:
        every = []
        for step in steps:
            every.append(selected := pool.select(step, *_rows(step, rank), keep=self._keep))
            pool.commit(selected, _decoded(selected.rows_KD))
        return every

    def repeats(self, capacity: int) -> None:
        """Runs again from the start, after a rewind and from a checkpoint."""
        last, middle = range(_STEPS - 4, _STEPS), range(_STEPS // 2, _STEPS)
        expected = self._run(pool := self._pool(capacity), range(_STEPS))
        again = [("the same calls give", range(_STEPS), self._run(self._pool(capacity), range(_STEPS)))]
        pool.slots.rewind(last.start)
        again.append(("steps after a rewind give", last, self._run(pool, last)))
        self._run(pool := self._pool(capacity), range(middle.start))
        (loaded := self._pool(capacity)).slots.load(pool.slots.state())
        again.append(("steps after a checkpoint give", middle, self._run(loaded, middle)))
        for what, steps, found in again:
            for step, selected in zip(steps, found, strict=True):
                same = _bits(selected) == _bits(expected[step])
                self._trial.require(same, f"{what} other bits in step {step}; it has state of its own")

    def share(self, obeys_keep: bool) -> None:
        every, by_rows = self._run(self._pool(), range(_STEPS)), self._selector.sends == "rows"
        sent = sum(len(each.ids_K) if by_rows else np.count_nonzero(each.rows_KD) for each in every)
        total = sum(len(_rows(step)[1]) for step in range(_STEPS)) * (1 if by_rows else _D)
        fits = sent <= 1.25 * self._keep * total + _T * _STEPS
        what = f"sent {sent} of {total} {self._selector.sends} with keep {self._keep:g}"
        self._trial.require(fits or not obeys_keep, what)

    def sums(self, conserves: bool) -> None:
        """Runs two workers whose states become one."""
        sums, pools = np.zeros((_T, _IDS, _D)), [self._pool() for _ in range(2)]
        for rank, pool in enumerate(pools):
            for step, each in enumerate(self._run(pool, range(_STEPS), rank)):
                sums += _dense(*_rows(step, rank)) - _dense(each.starts_T1, each.ids_K, _decoded(each.rows_KD))
        (one := self._pool()).slots.load(state := merge([pool.slots.state() for pool in pools]))
        sums[state["tables"], state["ids"]] -= state["rests"][:, :_D]
        lost = np.abs(sums).max()
        self._trial.require(
            not conserves or lost < 1e-4, f"sent + residuals differ from the sum of gradients by {lost:.3g}"
        )
        self._run(one, range(_STEPS, _STEPS + 1))

    def odd_rows(self) -> None:
        self._run(pool := self._pool(), range(1))
        before, (starts_T1, ids_V, grad_VD) = pool.slots.state()["rests"], _rows(0)
        bad = pool.select(1, starts_T1, ids_V, np.full_like(grad_VD, np.nan), keep=1.0)
        self._trial.require(not bad.ids_K.size, f"sent {bad.ids_K.size} rows of NaN")
        pool.commit(bad, bad.rows_KD)
        self._trial.require(np.array_equal(pool.slots.state()["rests"], before), "a row of NaN changed a state")
        last = pool.select(2, starts_T1, ids_V, grad_VD, keep=self._keep, flush=True)
        self._trial.require(np.isfinite(last.rows_KD).all(), "sent a row that is not finite, after a row of NaN")


def _rows(step: int, rank: int = 0) -> tuple[Ints, Ints, Floats]:
    """Gradients of different sizes, which float32 adds exactly. Every fifth step has no rows."""
    rng = np.random.default_rng([step, rank])
    per_table = [np.sort(rng.permutation(_IDS)[: 0 if step % 5 == 4 else 30]) for _ in range(_T)]
    ids_V = np.concatenate(per_table).astype(np.int64)
    grad_VD = np.round(rng.normal(size=(ids_V.size, _D)) * rng.lognormal(0, 1, size=(ids_V.size, 1)) * 64) / 64
    return np.cumsum([0, *map(len, per_table)]), ids_V, grad_VD.astype(np.float32)


def _decoded(rows_KD: Floats) -> Floats:
    """Rows of a coarse number format."""
    return np.round(rows_KD * 8).astype(np.float32) / np.float32(8)


def _dense(starts_T1: Ints, ids_V: Ints, rows_VD: Floats) -> Float64s:
    out = np.zeros((_T, _IDS, _D))
    out[np.repeat(np.arange(_T), np.diff(starts_T1)), ids_V] = rows_VD
    return out


def _bits(selected: Selected) -> bytes:
    return b"".join(array.tobytes() for array in (selected.starts_T1, selected.ids_K, selected.rows_KD))
