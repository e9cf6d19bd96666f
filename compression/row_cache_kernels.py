"""Kernels of cached rows: copying those that are fresh enough, and taking new ones into slots."""
# T = tables, V = rows, D = embedding dim, S = slots

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.kernels import kernel
from shardkeep.compression.slot_kernels import (
    CACHED,
    CANDIDATES,
    FLAGS,
    FREE,
    HAND,
    POOL,
    READ,
    TOUCHED,
    UNSENT,
    Pool,
    find,
    heads_of,
    index_of,
    occupy,
)

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Marks = npt.NDArray[np.bool_]

_INTS = "Array(int64, 1, 'C', readonly=True)"
_ROWS = "Array(float32, 2, 'C', readonly=True)"


@kernel(f"int64({POOL}, float32[:,::1], int64, int64, {_INTS}, {_INTS}, float32[:,::1], boolean[::1])")
def lookup(
    pool: Pool,
    rows_SD: Float32,
    step: int,
    lease: int,
    starts_T1: Int64,
    ids_V: Int64,
    out_VD: Float32,
    hit_V: Marks,
) -> int:
    """Copies the rows that were read at most `lease` steps before `step`; returns how many."""
    heads_SH, entries = heads_of(pool), index_of(pool)
    hits = 0
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            slot = find(entries, heads_SH, t, ids_V[v])
            hit_V[v] = False
            if slot < 0 or not heads_SH[slot, FLAGS] & CACHED or not 0 <= step - heads_SH[slot, READ] <= lease:
                continue
            heads_SH[slot, FLAGS] |= TOUCHED
            hit_V[v] = True
            hits += 1
            for d in range(out_VD.shape[1]):
                out_VD[v, d] = rows_SD[slot, d]
    return hits


@kernel(f"int64({POOL}, int64)")
def room_for_row(pool: Pool, step: int) -> int:
    """A free slot, or under the hand, among CANDIDATES, one without a residual whose row was not used since the hand
    last passed and was read before `step`; -1 = none."""
    heads_SH = heads_of(pool)
    if pool[FREE] >= 0:
        return pool[FREE]  # type: ignore[no-any-return]
    size = heads_SH.shape[0]
    for _ in range(min(CANDIDATES, size)):
        slot = pool[HAND]
        pool[HAND] = slot + 1 if slot + 1 < size else 0
        if heads_SH[slot, FLAGS] & UNSENT or heads_SH[slot, READ] >= step:
            continue
        if not heads_SH[slot, FLAGS] & TOUCHED:
            return slot  # type: ignore[no-any-return]
        heads_SH[slot, FLAGS] &= ~TOUCHED
    return -1


@kernel(f"int64({POOL}, float32[:,::1], int64, {_INTS}, {_INTS}, {_ROWS})")
def store(pool: Pool, rows_SD: Float32, step: int, starts_T1: Int64, ids_V: Int64, rows_VD: Float32) -> int:
    """Takes rows read at `step`, those that find room; returns how many."""
    heads_SH, entries = heads_of(pool), index_of(pool)
    stored = 0
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            slot = find(entries, heads_SH, t, ids_V[v])
            if slot < 0:
                slot = room_for_row(pool, step)
                if slot < 0:
                    continue
                occupy(pool, slot, t, ids_V[v])
            heads_SH[slot, FLAGS] |= CACHED
            heads_SH[slot, READ] = step
            stored += 1
            for d in range(rows_VD.shape[1]):
                rows_SD[slot, d] = rows_VD[v, d]
    return stored
