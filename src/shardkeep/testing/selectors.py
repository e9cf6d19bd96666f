"""check_selector: whether a selector of your own is pure, so that the state which the pool keeps is all it needs."""
# T = tables, V = rows of a step, K = sent rows, D = embedding dim

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.compression.selection.checked import CheckedSelector
from shardkeep.compression.selection.pool import ResidualPool
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

    def _run(self, pool: ResidualPool, first: int = 0, end: int = _STEPS, rank: int = 0) -> Floats:
        """Rows that are sent in steps, float32 (steps, T, ids, D)."""
        sent = np.zeros((end - first, _T, _IDS, _D), np.float32)
        for step in range(first, end):
            selected = pool.select(step, *_rows(step, rank), keep=self._keep)
            sent[step - first] = _dense(selected.starts_T1, selected.ids_K, selected.rows_KD)
            pool.commit(selected, _decoded(selected.rows_KD))
        return sent

    def repeats(self, capacity: int) -> None:
        """Runs again from the start, after a rewind and from a checkpoint."""
        late, middle = _STEPS - 4, _STEPS // 2
        expected = self._run(pool := self._pool(capacity))
        self._same("the same calls give", self._run(self._pool(capacity)), expected)
        pool.slots.rewind(late)
        self._same("steps after a rewind give", self._run(pool, late), expected)
        self._run(pool := self._pool(capacity), 0, middle)
        (loaded := self._pool(capacity)).slots.load(pool.slots.state())
        self._same("steps after a checkpoint give", self._run(loaded, middle), expected)

    def _same(self, what: str, sent: Floats, expected: Floats) -> None:
        first = _STEPS - len(sent)
        steps = first + np.flatnonzero((sent != expected[first:]).any(axis=(1, 2, 3)))
        self._trial.require(
            not steps.size,
            f"{what} other bits in step {min(steps, default=0)}; it has state of its own; keep it in state_VW",
        )

    def share(self, obeys_keep: bool) -> None:
        sent, by_rows = self._run(self._pool()), self._selector.sends == "rows"
        count = np.count_nonzero(sent.any(axis=3) if by_rows else sent)
        total = sum(len(_rows(step)[1]) for step in range(_STEPS)) * (1 if by_rows else _D)
        fits = count <= 1.25 * self._keep * total + _T * _STEPS
        what = (
            f"sent {count} of {total} {self._selector.sends} with keep {self._keep:g}; if it may, pass obeys_keep=False"
        )
        self._trial.require(fits or not obeys_keep, what)

    def sums(self, conserves: bool) -> None:
        """Runs two workers whose states become one."""
        sums, pools = np.zeros((_T, _IDS, _D)), [self._pool() for _ in range(2)]
        for rank, pool in enumerate(pools):
            sums -= _decoded(self._run(pool, rank=rank)).sum(axis=0, dtype=np.float64)
            sums += sum(_dense(*_rows(step, rank)) for step in range(_STEPS))
        (one := self._pool()).slots.load(state := merge([pool.slots.state() for pool in pools]))
        sums[state["tables"], state["ids"]] -= state["rests"][:, :_D]
        lost = np.abs(sums).max()
        self._trial.require(
            lost < 1e-4 or not conserves, f"sent + residuals differ from the sum of gradients by {lost:.3g}"
        )
        self._run(one, _STEPS, _STEPS + 1)

    def odd_rows(self) -> None:
        self._run(pool := self._pool(), 0, 1)
        before, (starts_T1, ids_V, grad_VD) = pool.slots.state()["rests"], _rows(0)
        bad = pool.select(1, starts_T1, ids_V, np.full_like(grad_VD, np.nan), keep=1.0)
        self._trial.require(not bad.ids_K.size, f"sent {bad.ids_K.size} rows of NaN")
        pool.commit(bad, bad.rows_KD)
        self._trial.require(np.array_equal(pool.slots.state()["rests"], before), "a row of NaN changed a state")
        last = pool.select(2, *_rows(1), keep=self._keep, flush=True)  # and what waits of step 0
        self._trial.require(np.isfinite(last.rows_KD).all(), "sent a row that is not finite, after a row of NaN")
        pool.commit(last, _decoded(last.rows_KD))


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
