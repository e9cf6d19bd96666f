"""ElementPool: unsent gradient of rows, sent element by element: top-k with residual, and DGC.

The opponents of the row pool (row_pool.py). With momentum it is Deep Gradient Compression (Lin et al., ICLR 2018), for
servers with plain SGD only, and then replaces the momentum of the optimizer. Knows no server and no packet.
"""
# T = tables of the group, V = a step's rows, E = rows besides those, K = rows with sent elements, D = embedding dim

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.compression.selection import element_pool_kernels as kernels
from shardkeep.compression.selection import row_pool_state
from shardkeep.compression.selection.row_pool import check_rows
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slot_kernels import ID, LOST_ROWS, TABLE
from shardkeep.compression.selection.slots import RowSlots
from shardkeep.compression.selection.threshold import largest

_LOST_SQUARES = 0


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SelectedElements:
    """Elements to send: rows with at least one, each table's sorted by id. Nobody changes the arrays."""

    starts_T1: Ints
    ids_K: Ints
    rows_KD: Floats
    """float32 (K, D), zeros where nothing is sent."""
    mask_KD: Bools
    slots_K: Ints
    """Where the rows' residuals lie, -1 = nowhere: for `commit`."""
    num_overflow: int = 0
    """Rows sent whole because there was no slot."""
    num_bad: int = 0
    """Rows of the step left out because they are, or would be, not finite."""


class ElementPool:
    """`capacity` slots for rows of `num_tables` tables of one `dim`. Not thread safe. Without `dgc` plain top-k with
    residual: sum(decoded) + sum(residuals) + lost == sum(gradients), as in the row pool.

    A row for which there is no slot is sent whole, as is a residual that gives its slot to a row with a larger one
    (its u is forgotten)."""

    def __init__(self, *, num_tables: int, dim: int, capacity: int, history: int, dgc: Dgc | None = None) -> None:
        """`history`: how many steps back `rewind` can go."""
        if min(num_tables, dim, capacity) < 1 or history < 0:
            given = f"{num_tables} tables, dim {dim}, capacity {capacity}, history {history}"
            raise ValueError(f"{given}; allowed: 1 or more, history 0 or more")
        self.num_tables, self.dim, self.capacity = num_tables, dim, capacity
        self._dgc = dgc if dgc is not None else Dgc(momentum=0.0)
        width = 2 * dim if self._dgc.momentum > 0.0 else dim
        self._slots = RowSlots(width=width, capacity=capacity, history=history, num_sums=1)
        self._open: SelectedElements | None = None

    def select(
        self, step: int, starts_T1: Ints, ids_V: Ints, grad_VD: Floats, *, keep: float, flush: bool = False
    ) -> SelectedElements:
        """The elements to send in `step`: of each table's rows of this step the `num_kept` largest of v by magnitude,
        never zeros, of equal ones the first; and the rows that find no slot. `flush`: all of all other rows' v, too.

        Raises ValueError as `RowPool.select` does."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, grad_VD)
        num_kept(1, keep)
        self._check_closed()
        self._slots.begin(step)
        slots_V, values_VD, extra_E2, extra_ED = self._accumulate(step, starts_T1, ids_V, grad_VD)
        mask_VD = self._mask(starts_T1, values_VD, keep)
        whole_V = slots_V == kernels.NONE
        mask_VD[whole_V] = values_VD[whole_V] != 0.0
        tables_V = np.repeat(np.arange(self.num_tables), np.diff(starts_T1))
        sent = np.flatnonzero(mask_VD.any(axis=1))
        held = np.setdiff1d(self._slots.unsent(), slots_V) if flush else np.empty(0, dtype=np.int64)
        held = held[self._slots.rests_SW[held, : self.dim].any(axis=1)]
        heads, rests = self._slots.heads_SH[held], self._slots.rests_SW[held, : self.dim]
        return self._opened(
            np.concatenate([tables_V[sent], extra_E2[:, 0], heads[:, TABLE]]),
            np.concatenate([ids_V[sent], extra_E2[:, 1], heads[:, ID]]),
            np.concatenate([values_VD[sent], extra_ED, rests]),
            np.concatenate([mask_VD[sent], extra_ED != 0.0, rests != 0.0]),
            np.concatenate([slots_V[sent], np.full(len(extra_E2), -1), held]),
            num_overflow=len(extra_E2) + int(np.count_nonzero(mask_VD[whole_V].any(axis=1))),
            num_bad=int(np.count_nonzero(slots_V == kernels.BAD)),
        )

    def commit(self, selected: SelectedElements, sent_KD: Floats) -> None:
        """Notes what the receiver will decode of the selected elements, float32 (K, D), zeros elsewhere: v becomes
        v - sent, and with masking u becomes zero there. A row without a slot loses its rounding error.

        Raises ValueError for another selection than the last one, rows of another form or such that are not finite."""
        if selected is not self._open:
            raise ValueError("only the last selection can be committed, once")
        if sent_KD.shape != selected.rows_KD.shape or sent_KD.dtype != np.float32 or not np.isfinite(sent_KD).all():
            expected = f"expected finite float32 {selected.rows_KD.shape}"
            raise ValueError(f"sent rows of {sent_KD.dtype} {sent_KD.shape}; {expected}")
        self._slots.reserve(selected.ids_K.size)
        rests_SW, has_slot = self._slots.rests_SW, selected.slots_K >= 0
        slots, mask, dim = selected.slots_K[has_slot], selected.mask_KD[has_slot], self.dim
        kernels.touch_all(self._slots.pool, slots)
        rests_SW[slots, :dim] -= np.where(mask, sent_KD[has_slot], 0.0)
        if self._dgc.masking and self._dgc.momentum > 0.0:
            rests_SW[slots, dim:] = np.where(mask, 0.0, rests_SW[slots, dim:])
        errors = (selected.rows_KD - sent_KD)[~has_slot] * selected.mask_KD[~has_slot]
        self._slots.control[LOST_ROWS] += np.count_nonzero(errors.any(axis=1))
        self._slots.sums[_LOST_SQUARES] += (errors.astype(np.float64) ** 2).sum()
        kernels.settle_zeros(self._slots.pool, slots, dim)
        self._open = None

    def rewind(self, step: int) -> None:
        """Back to the content at the start of `step`, an open selection forgotten.

        Raises KeyError when `step` is not one of the last `history` steps."""
        self._slots.rewind(step)
        self._open = None

    @property
    def num_unsent(self) -> int:
        """Rows with a residual or a momentum."""
        return self._slots.num_unsent

    @property
    def unsent_norm(self) -> float:
        """L2 norm of all v together, summed in float64."""
        return float(np.sqrt((self._slots.rests_SW[self._slots.unsent(), : self.dim].astype(np.float64) ** 2).sum()))

    @property
    def lost_rows(self) -> int:
        """Rows whose rounding error was given up."""
        return int(self._slots.control[LOST_ROWS])

    @property
    def lost_squares(self) -> float:
        """Sum of squares of what was given up."""
        return float(self._slots.sums[_LOST_SQUARES])

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """As `RowPool.state`; `rests` are v, with momentum u behind it."""
        self._check_closed()
        return row_pool_state.of_slots(self._slots)

    def load(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """As `RowPool.load`."""
        row_pool_state.into_slots(self._slots, state)
        self._open = None

    def _mask(self, starts_T1: Ints, values_VD: Floats, keep: float) -> Bools:
        mask_VD = np.zeros(values_VD.shape, dtype=np.bool_)
        for t in range(self.num_tables):
            part = slice(int(starts_T1[t]), int(starts_T1[t + 1]))
            values = values_VD[part].reshape(-1)
            mask_VD[part].reshape(-1)[largest(values, num_kept(values.size, keep))] = True
        mask_VD &= values_VD != 0.0
        return mask_VD

    def _accumulate(
        self, step: int, starts_T1: Ints, ids_V: Ints, grad_VD: Floats
    ) -> tuple[Ints, Floats, Ints, Floats]:
        """Adds a step's gradients to the residuals.

        Returns the slot of each row, int64 (V,), v of each row, float32 (V, D), and the table, id and v of each row
        that lost its slot with a v that is not zero, int64 (E, 2) and float32 (E, D)."""
        self._slots.reserve(ids_V.size)
        slots_V = np.empty(ids_V.size, dtype=np.int64)
        values_VD, extra_ED = np.empty_like(grad_VD), np.empty_like(grad_VD)
        extra_E2 = np.empty((ids_V.size, 2), dtype=np.int64)
        num_extra = kernels.accumulate(
            self._slots.pool,
            step,
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

    def _opened(
        self, tables: Ints, ids: Ints, values: Floats, mask: Bools, slots: Ints, **counts: int
    ) -> SelectedElements:
        order_K = np.lexsort((ids, tables))
        starts_T1 = np.searchsorted(tables[order_K], np.arange(self.num_tables + 1)).astype(np.int64)
        mask_KD = np.ascontiguousarray(mask[order_K])
        rows_KD = np.where(mask_KD, values[order_K], np.float32(0.0))
        self._open = SelectedElements(starts_T1, ids[order_K], rows_KD, mask_KD, slots[order_K], **counts)
        return self._open

    def _check_closed(self) -> None:
        if self._open is not None:
            raise ValueError("the last selection was not committed")
