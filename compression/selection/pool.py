"""ResidualPool: a worker's bounded memory of what its selector has not sent yet.

Numpy in, numpy out: knows no value format, no server, no message. Nothing is dropped: what finds no room is sent.
"""
# T = tables of the group, V = a step's rows, E = rows besides those, R = both, K = sent rows, W = values of a state,
# D = embedding dim

from __future__ import annotations

import dataclasses

import numpy as np

from shardkeep.base.arrays import Bools, Bytes, Floats, Ints, UInt64s
from shardkeep.compression.selection import pool_kernels as kernels
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.selector import Selector, Step
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slot_kernels import ID, SQUARES, TABLE
from shardkeep.compression.selection.slots import RowSlots, check_rows


@dataclasses.dataclass(slots=True, eq=False)
class _Rows:
    """The rows of a step, and then those that are sent besides."""

    tables_R: Ints
    ids_R: Ints
    slots_R: Ints
    state_RW: Floats
    values_RD: Floats
    squares_R: Floats
    fates_R: Bytes
    mask_RD: Bools
    """The values that are sent of a row, (R, D) or (R, 1)."""

    def add(self, tables_E: Ints, ids_E: Ints, slots_E: Ints, state_EW: Floats, squares_E: Floats) -> None:
        """Appends rows that are sent whole."""
        fates_E = np.full(ids_E.size, kernels.SENT, dtype=np.uint8)
        mask_ED = np.ones((ids_E.size, self.mask_RD.shape[1]), dtype=np.bool_)
        values_ED = state_EW[:, : self.values_RD.shape[1]]
        more = tables_E, ids_E, slots_E, state_EW, values_ED, squares_E, fates_E, mask_ED
        for field, other in zip(dataclasses.fields(self), more, strict=True):
            setattr(self, field.name, np.concatenate([getattr(self, field.name), other]))


class ResidualPool:
    """Runs a selector over slots for rows of some tables of one `dim`. Not thread safe.

    What it does is a function of its calls' arguments alone. Every step: `select`, encode the rows, `commit` what the
    receiver will decode; then in float64, at every step, with the default `accumulate` and `settle`,

        sum(decoded) + sum(residuals) + lost == sum(gradients)

    up to float32 rounding of gradient + residual. Lost are only the rounding errors of sent rows that found no slot, or
    whose slot another row took: alone they are not worth their bytes. `lost_rows` and `lost_squares` count them.

    Args:
        slots: Of `selector.state_values(dim)` values.
        keys_T: Of the tables, for `Draws`.
    """

    def __init__(self, selector: Selector, slots: RowSlots, *, dim: int, keys_T: UInt64s, num_workers: int = 1) -> None:
        self.slots = slots
        self._selector, self._dim = selector, dim
        self._keys_T, self._num_workers = keys_T, num_workers
        self._open: tuple[Selected, _Rows, Ints] | None = None

    def select(
        self, step: int, starts_T1: Ints, ids_V: Ints, grad_VD: Floats, *, keep: float, flush: bool = False
    ) -> Selected:
        """The rows to send in `step`; the rest of the gradients is kept back. Steps rise.

        Table t has the ids `starts[t]` up to `starts[t + 1]`, sorted and unique (so no row is in several parts). Sent
        are what the selector chooses, and what finds no slot: of a new row and the least of a few slots, the one with
        the lower norm is sent whole. With `flush` all of the step's values and every other row in which a gradient
        waits, and not only a rounding error.

        A row that would not be finite is left out and its state stays as it is.

        Raises ValueError for inputs of another form, ids out of order, a step that is not above the last one, or when
        the last selection was not committed."""
        check_rows(self._keys_T.size, self._dim, starts_T1, ids_V, grad_VD)
        num_kept(1, keep)
        self.slots.begin(step)
        given = Step(step, keep, starts_T1, ids_V, self._num_workers, self._keys_T)
        rows, norms_V = self._of_step(given, grad_VD, flush)
        num_overflow = self._place(starts_T1, rows, norms_V)
        if flush:
            others = self.slots.waiting_untouched()
            heads_EH, floats_EF = self.slots.heads_SH[others], self.slots.floats_SF[others]
            states_EW = self.slots.states_SW[others]
            rows.add(heads_EH[:, TABLE], heads_EH[:, ID], others, states_EW, floats_EF[:, SQUARES])
        sent = np.flatnonzero(rows.fates_R >= kernels.PART)
        if rows.ids_R.size > ids_V.size:
            sent = sent[np.lexsort((rows.ids_R[sent], rows.tables_R[sent]))]
        selected = self._selected(rows, sent, num_overflow)
        self._open = selected, rows, sent
        return selected

    def commit(self, selected: Selected, sent_KD: Floats) -> None:
        """Notes what the receiver will decode for the selected rows, float32 (K, D): the selector settles the states. A
        row without a slot takes a free one or that of a clean cached row, else its rounding error is lost. A row with
        nothing left frees its slot. A row that does not decode to finite values keeps no state, and makes
        `lost_squares` infinite or NaN.

        Raises ValueError for another selection than the last one, or rows of another form."""
        if self._open is None or selected is not self._open[0] or not self.slots.is_open:
            raise ValueError("only the last selection can be committed, once")
        if sent_KD.shape != selected.rows_KD.shape or sent_KD.dtype != np.float32:
            raise ValueError(f"sent rows of {sent_KD.dtype} {sent_KD.shape}; expected float32 {selected.rows_KD.shape}")
        (_, rows, sent), self._open = self._open, None
        self.slots.is_open = False
        decoded_RD = np.zeros_like(rows.values_RD)
        decoded_RD[sent] = sent_KD
        with np.errstate(all="ignore"):
            mask_RD = np.broadcast_to(rows.mask_RD, decoded_RD.shape)
            self._selector.settle(rows.state_RW, rows.values_RD, mask_RD, decoded_RD)
        waits_R = (rows.fates_R == kernels.KEPT) | (rows.fates_R == kernels.PART)
        order = np.concatenate([np.flatnonzero(waits_R), sent[~waits_R[sent]]])
        kernels.commit(
            self.slots.pool(sent.size), self._dim, order, rows.tables_R, rows.ids_R, rows.squares_R, rows.fates_R,
            rows.slots_R, rows.state_RW,
        )  # fmt: skip

    def _of_step(self, step: Step, grad_VD: Floats, flush: bool) -> tuple[_Rows, Floats]:
        """A step's rows with what the selector chooses, and the norms of their values."""
        size, columns = step.ids_V.size, 1 if self._selector.sends == "rows" else self._dim
        slots_V, squares_V, norms_V = np.empty(size, dtype=np.int64), *np.empty((2, size), dtype=np.float32)
        state_VW = np.empty((size, self.slots.width), dtype=np.float32)
        kernels.read_states(self.slots.pool(size), step.starts_T1, step.ids_V, slots_V, state_VW, squares_V)
        with np.errstate(all="ignore"):
            values_VD = self._selector.accumulate(step, state_VW, grad_VD)
        kernels.measure(grad_VD, values_VD, squares_V, norms_V)
        mask = np.ones((size, columns), dtype=np.bool_)
        if not flush:
            step = dataclasses.replace(step, norms_V=norms_V)
            mask[:] = self._selector.choose(step, values_VD).reshape(size, columns)
        complete_V = mask[:, 0]
        if self._selector.sends == "values":
            nonzero_VD = values_VD != 0.0
            mask &= nonzero_VD
            complete_V = (mask == nonzero_VD).all(axis=1)
        fates_V = np.where(mask.any(axis=1), np.where(complete_V, kernels.SENT, kernels.PART), kernels.KEPT)
        fates_V = np.where(norms_V < 0.0, kernels.BAD, fates_V).astype(np.uint8)
        tables_V = np.repeat(np.arange(self._keys_T.size), np.diff(step.starts_T1))
        return _Rows(tables_V, step.ids_V, slots_V, state_VW, values_VD, squares_V, fates_V, mask), norms_V

    def _place(self, starts_T1: Ints, rows: _Rows, norms_V: Floats) -> int:
        """Gives slots to rows that wait, and adds those that lose theirs; how many rows are sent for want of one."""
        victims_E3, squares_E = np.empty((norms_V.size, 3), dtype=np.int64), np.empty(norms_V.size, dtype=np.float32)
        count = kernels.place(
            self.slots.pool(norms_V.size), self._dim, starts_T1, rows.ids_R, rows.squares_R, norms_V, rows.slots_R,
            rows.fates_R, victims_E3, squares_E,
        )  # fmt: skip
        whole = np.flatnonzero(rows.fates_R == kernels.OVERFLOW)
        rows.mask_RD[whole] = True
        if count:
            tables_E, ids_E, at_E = victims_E3[:count].T
            rows.add(tables_E, ids_E, np.full(count, -1), self.slots.states_SW[at_E], squares_E[:count])
        return whole.size + count

    def _selected(self, rows: _Rows, sent: Ints, num_overflow: int) -> Selected:
        rows_KD = rows.values_RD[sent]
        if self._selector.sends == "values":
            rows_KD[~rows.mask_RD[sent]] = 0.0
        starts_T1 = np.searchsorted(rows.tables_R[sent], np.arange(self._keys_T.size + 1)).astype(np.int64)
        num_bad = int(np.count_nonzero(rows.fates_R == kernels.BAD))
        return Selected(starts_T1, rows.ids_R[sent], rows_KD, rows.squares_R[sent], num_overflow, num_bad)
