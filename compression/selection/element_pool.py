"""ElementPool: unsent gradient of rows, sent element by element: top-k with residual, and DGC.

The opponents of the row pool (row_pool.py). With momentum it is Deep Gradient Compression (Lin et al., ICLR 2018), for
servers with plain SGD only, and then replaces the momentum of the optimizer. Knows no server and no packet.
"""
# T = tables of the group, V = a step's rows, E = rows besides those, K = rows with sent elements, D = embedding dim

from __future__ import annotations

import dataclasses
import math

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.compression.selection import element_pool_kernels as kernels
from shardkeep.compression.selection.row_pool import check_rows, check_sizes
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slot_kernels import ID, LOST_ROWS, TABLE
from shardkeep.compression.selection.slots import RowSlots
from shardkeep.compression.selection.threshold_kernels import mark_largest

_MAGNITUDE = np.int32(0x7FFFFFFF)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Dgc:
    """Deep Gradient Compression, for each row of a step: u <- momentum * u + g, v <- v + u; with `nesterov`
    u <- momentum * (u + g), v <- v + u + g. Rows that a step does not touch stay as they are."""

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    """Momentum factor masking: a sent element's u becomes zero, so that it does not continue in an old direction."""
    clip_norm: float = 0.0
    """The pool's gradient of a step is scaled down to an L2 norm of clip_norm / sqrt(num_workers), because independent
    noise of N workers adds up in squares; 0 = no clipping."""
    num_workers: int = 1


class ElementPool:
    """`capacity` slots for rows of `num_tables` tables of one `dim`. Not thread safe. Without `dgc` plain top-k with
    residual: sum(decoded) + sum(residuals) + lost == sum(gradients), as in the row pool.

    A row for which there is no slot is sent whole, as is a residual that gives its slot to a row with a larger one
    (its u is forgotten)."""

    def __init__(self, *, num_tables: int, dim: int, capacity: int, history: int, dgc: Dgc | None = None) -> None:
        """`history`: how many steps back `rewind` can go."""
        check_sizes(num_tables, dim, capacity, history)
        self.num_tables, self.dim = num_tables, dim
        self._dgc = dgc if dgc is not None else Dgc(momentum=0.0)
        width = 2 * dim if self._dgc.momentum > 0.0 else dim
        self.slots = RowSlots(width=width, capacity=capacity, history=history)

    def select(
        self,
        step: int,
        starts_T1: Ints,
        ids_V: Ints,
        grad_VD: Floats,
        *,
        keep: float,
        flush: bool = False,
    ) -> Selected:
        """The elements to send in `step`, zeros elsewhere in their rows: of each table's rows of this step the
        `num_kept` largest of v by magnitude, never zeros, of equal ones the first; and the rows that find no slot.
        `flush`: all of all other rows' v, too.

        Raises ValueError as `RowPool.select` does."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, grad_VD)
        num_kept(1, keep)
        self.slots.begin(step)
        slots_V, values_VD, extra_E2, extra_ED = self._accumulate(starts_T1, ids_V, grad_VD)
        mask_VD = self._mask(starts_T1, values_VD, keep)
        whole_V = slots_V == kernels.NONE
        mask_VD[whole_V] = values_VD[whole_V] != 0.0
        tables_V = np.repeat(np.arange(self.num_tables), np.diff(starts_T1))
        sent = np.flatnonzero(mask_VD.any(axis=1))
        held = np.setdiff1d(self.slots.unsent(), slots_V) if flush else np.empty(0, dtype=np.int64)
        held = held[self.slots.rests_SW[held, : self.dim].any(axis=1)]
        heads, rests = self.slots.heads_SH[held], self.slots.rests_SW[held, : self.dim]
        return self._selected(
            np.concatenate([tables_V[sent], extra_E2[:, 0], heads[:, TABLE]]),
            np.concatenate([ids_V[sent], extra_E2[:, 1], heads[:, ID]]),
            np.concatenate([np.where(mask_VD[sent], values_VD[sent], np.float32(0.0)), extra_ED, rests]),
            np.concatenate([slots_V[sent], np.full(len(extra_E2), -1), held]),
            num_overflow=len(extra_E2) + int(np.count_nonzero(mask_VD[whole_V].any(axis=1))),
            num_bad=int(np.count_nonzero(slots_V == kernels.BAD)),
        )

    def commit(self, selected: Selected, sent_KD: Floats) -> None:
        """Notes what the receiver will decode of the selected elements, float32 (K, D), zeros elsewhere: v becomes
        v - sent, and with masking u becomes zero there. A row without a slot loses its rounding error.

        Raises ValueError for another selection than the last one, rows of another form or such that are not finite."""
        if not np.isfinite(sent_KD).all():
            raise ValueError(f"sent rows are not finite; expected finite float32 {selected.rows_KD.shape}")
        self.slots.close(selected, sent_KD)
        rests_SW, has_slot = self.slots.rests_SW, selected.slots_K >= 0
        slots, mask, dim = selected.slots_K[has_slot], selected.rows_KD[has_slot] != 0.0, self.dim
        kernels.touch_all(self.slots.pool, slots)
        rests_SW[slots, :dim] -= np.where(mask, sent_KD[has_slot], 0.0)
        if self._dgc.masking and self._dgc.momentum > 0.0:
            rests_SW[slots, dim:] = np.where(mask, 0.0, rests_SW[slots, dim:])
        errors = (selected.rows_KD - sent_KD)[~has_slot] * (selected.rows_KD[~has_slot] != 0.0)
        self.slots.control[LOST_ROWS] += np.count_nonzero(errors.any(axis=1))
        self.slots.sums[0] += (errors.astype(np.float64) ** 2).sum()
        kernels.settle_zeros(self.slots.pool, slots, dim)

    def _mask(self, starts_T1: Ints, values_VD: Floats, keep: float) -> Bools:
        mask_VD = np.zeros(values_VD.shape, dtype=np.bool_)
        for t in range(self.num_tables):
            part = slice(int(starts_T1[t]), int(starts_T1[t + 1]))
            values = values_VD[part].reshape(-1)
            mask_VD[part].reshape(-1)[largest(values, num_kept(values.size, keep))] = True
        mask_VD &= values_VD != 0.0
        return mask_VD

    def _accumulate(self, starts_T1: Ints, ids_V: Ints, grad_VD: Floats) -> tuple[Ints, Floats, Ints, Floats]:
        """Adds a step's gradients to the residuals.

        Returns the slot of each row, int64 (V,), v of each row, float32 (V, D), and the table, id and v of each row
        that lost its slot with a v that is not zero, int64 (E, 2) and float32 (E, D)."""
        self.slots.log.reserve(ids_V.size)
        slots_V = np.empty(ids_V.size, dtype=np.int64)
        values_VD, extra_ED = np.empty_like(grad_VD), np.empty_like(grad_VD)
        extra_E2 = np.empty((ids_V.size, 2), dtype=np.int64)
        num_extra = kernels.accumulate(
            self.slots.pool,
            starts_T1,
            ids_V,
            grad_VD,
            np.float32(self._clip_factor(grad_VD)),
            np.float32(self._dgc.momentum),
            self._dgc.nesterov,
            slots_V,
            values_VD,
            extra_E2,
            extra_ED,
        )
        extra = np.flatnonzero(extra_ED[:num_extra].any(axis=1))
        return slots_V, values_VD, extra_E2[extra], extra_ED[extra]

    def _clip_factor(self, grad_VD: Floats) -> float:
        if self._dgc.clip_norm <= 0.0:
            return 1.0
        squares_V = np.einsum("vd,vd->v", grad_VD, grad_VD, dtype=np.float64)
        norm = math.sqrt(squares_V[np.isfinite(squares_V)].sum())
        return min(1.0, self._dgc.clip_norm / math.sqrt(self._dgc.num_workers) / norm) if norm > 0.0 else 1.0

    def _selected(self, tables: Ints, ids: Ints, rows: Floats, slots: Ints, **counts: int) -> Selected:
        order_K = np.lexsort((ids, tables))
        starts_T1 = np.searchsorted(tables[order_K], np.arange(self.num_tables + 1)).astype(np.int64)
        return self.slots.opened(Selected.plain(starts_T1, ids[order_K], rows[order_K], slots[order_K], **counts))


def largest(values_N: Floats, count: int) -> Ints:
    """Positions of the `count` values of largest magnitude (all, if there are fewer), int64, ascending.

    Signs play no part: the caller takes signed values by position. Of equal magnitudes the first are taken. NaN counts
    as the largest, then infinities: what is not finite is seen, never hidden. `values_N`: float32, contiguous.

    Raises TypeError for values of another form.
    """
    if values_N.dtype != np.float32 or values_N.ndim != 1 or not values_N.flags.c_contiguous:
        raise TypeError(f"values of {values_N.dtype} {values_N.shape}; allowed: contiguous float32 (N,)")
    marks_N = np.zeros(values_N.size, dtype=np.uint8)
    mark_largest(values_N.view(np.int32) & _MAGNITUDE, count, marks_N)
    return np.flatnonzero(marks_N)
