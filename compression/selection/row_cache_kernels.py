"""Kernels of cached rows: copying those that are fresh enough, and taking new ones into slots.

A cached row has one value more, its speed: by what share of its norm it moves in a step, going by its last two
readings. It falls by half at most from one reading to the next, so that a row that stood still once, or moved by less
than its number format shows, is trusted a little longer each time.
"""
# T = tables, V = rows, D = embedding dim, C = D + 1, S = slots

from __future__ import annotations

import math

import numpy as np
from numba.core import types
from numba.core.types import boolean, float32, float64, int64, void

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.selection import slot_kernels as k
from shardkeep.compression.selection.slot_kernels import INTS, POOL, Pool

_ROWS = types.Array(float32, 2, "C", readonly=True)


@kernel(void(POOL, float32[:, ::1], int64, int64, INTS, INTS, float32[:, ::1], boolean[::1], float64))
def lookup(
    pool: Pool,
    rows_SC: Floats,
    step: int,
    lease: int,
    starts_T1: Ints,
    ids_V: Ints,
    out_VD: Floats,
    hit_V: Bools,
    drift: float,
) -> None:
    """Copies the rows that were read at most `lease` steps before `step` and have moved by `drift` at most since, if
    they resume at their speed."""
    heads_SH, entries = k.heads_of(pool), k.index_of(pool)
    dim = out_VD.shape[1]
    most = np.float32(drift)  # as speeds are: what is good for a step must be good for that step
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            slot = k.find(entries, heads_SH, t, ids_V[v])
            hit_V[v] = False
            if slot < 0 or not heads_SH[slot, k.FLAGS] & k.CACHED:
                continue
            age = step - heads_SH[slot, k.READ]
            if not 0 <= age <= lease or age * rows_SC[slot, dim] > most:
                continue
            heads_SH[slot, k.FLAGS] |= k.TOUCHED
            hit_V[v] = True
            for d in range(dim):
                out_VD[v, d] = rows_SC[slot, d]


@kernel(int64(POOL, int64))
def room_for_row(pool: Pool, step: int) -> int:
    """A free slot, or under the hand, among CANDIDATES, one without a residual whose row was not used since the hand
    last passed and was read before `step`; -1 = none."""
    heads_SH = k.heads_of(pool)
    if pool[k.FREE] >= 0:
        return pool[k.FREE]  # type: ignore[no-any-return]
    size = heads_SH.shape[0]
    for _ in range(min(k.CANDIDATES, size)):
        slot = pool[k.HAND]
        pool[k.HAND] = slot + 1 if slot + 1 < size else 0
        if heads_SH[slot, k.FLAGS] & k.UNSENT or heads_SH[slot, k.READ] >= step:
            continue
        if not heads_SH[slot, k.FLAGS] & k.TOUCHED:
            return slot  # type: ignore[no-any-return]
        heads_SH[slot, k.FLAGS] &= ~k.TOUCHED
    return -1


@kernel(float64(float32[::1], _ROWS, int64, int64))
def speed_of(old_C: Floats, rows_VD: Floats, v: int, age: int) -> float:
    """The speed of a cached row that was read again after `age` steps."""
    dim = rows_VD.shape[1]
    moved, size = 0.0, 0.0
    for d in range(dim):
        moved += (rows_VD[v, d] - old_C[d]) ** 2
        size += rows_VD[v, d] ** 2
    seen = math.sqrt(moved / size) / age if size > 0.0 else 0.0
    return max(0.5 * float(old_C[dim]), seen)


@kernel(int64(POOL, float32[:, ::1], int64, INTS, INTS, _ROWS, float64))
def store(pool: Pool, rows_SC: Floats, step: int, starts_T1: Ints, ids_V: Ints, rows_VD: Floats, drift: float) -> int:
    """Takes rows read at `step`, those that find room; returns how many. A new one is good for a step."""
    heads_SH, entries = k.heads_of(pool), k.index_of(pool)
    dim, stored = rows_VD.shape[1], 0
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            slot = k.find(entries, heads_SH, t, ids_V[v])
            if slot < 0:
                slot = room_for_row(pool, step)
                if slot < 0:
                    continue
                k.occupy(pool, slot, t, ids_V[v])
            age = step - heads_SH[slot, k.READ]
            if not heads_SH[slot, k.FLAGS] & k.CACHED:
                rows_SC[slot, dim] = drift
            elif age > 0:
                rows_SC[slot, dim] = speed_of(rows_SC[slot], rows_VD, v, age)
            heads_SH[slot, k.FLAGS] |= k.CACHED
            heads_SH[slot, k.READ] = step
            stored += 1
            for d in range(dim):
                rows_SC[slot, d] = rows_VD[v, d]
    return stored
