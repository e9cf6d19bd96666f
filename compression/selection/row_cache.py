"""RowCache: a worker's copies of rows that it has read. They lie beside the residuals, whose slots they share."""
# T = tables of the group, V = a step's rows, S = slots, D = embedding dim, C = D + 1

from __future__ import annotations

import math

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.compression.selection import row_cache_kernels as kernels
from shardkeep.compression.selection.slots import RowSlots, check_rows


class RowCache:
    """Rows of `num_tables` tables of one `dim`, 4 * (dim + 1) bytes a slot. Not thread safe."""

    def __init__(self, slots: RowSlots, *, num_tables: int, dim: int) -> None:
        self._slots, self._num_tables, self._dim = slots, num_tables, dim
        self._rows_SC = np.empty((slots.capacity, dim + 1), dtype=np.float32)  # the last is the speed

    def lookup(
        self, step: int, starts_T1: Ints, ids_V: Ints, out_VD: Floats, lease: int, drift: float = math.inf
    ) -> Bools:
        """Copies the cached rows that were read at most `lease` steps before `step` into `out_VD`, float32 (V, D);
        returns which, bool (V,). Other rows of `out_VD` stay as they are. Ids as in `ResidualPool.select`.

        A row that moves so much from reading to reading that it should differ by more than `drift` of its norm by now
        is not found either; one that was read once is good for a step."""
        check_rows(self._num_tables, self._dim, starts_T1, ids_V, out_VD)
        hit_V = np.empty(ids_V.size, dtype=np.bool_)
        kernels.lookup(self._slots.pool(), self._rows_SC, step, lease, starts_T1, ids_V, out_VD, hit_V, drift)
        return hit_V

    def store(self, step: int, starts_T1: Ints, ids_V: Ints, rows_VD: Floats, drift: float = math.inf) -> int:
        """Takes rows as a server gave them at `step`, over what is cached of them; returns how many found room.

        A new row takes a free slot, or among a few the first without a residual, not used since it was last looked at
        (second chance) and not read at this step."""
        check_rows(self._num_tables, self._dim, starts_T1, ids_V, rows_VD)
        return kernels.store(self._slots.pool(ids_V.size), self._rows_SC, step, starts_T1, ids_V, rows_VD, drift)
