"""Kernels of the residual pool: states of a step's rows, slots for rows that wait, and what is left after sending.

One call for the rows of all tables. Callers check shapes and order and give the log enough room. Sums of squares are in
float64, so that they neither overflow nor vanish.
"""
# T = tables, V = rows of a step, E = rows besides those of the step, R = both, W = values of a state, D = embedding dim

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.core.types import float32, float64, int64, uint8, void

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.selection import slot_kernels as k
from shardkeep.compression.selection.slot_kernels import INTS, POOL, Pool
from shardkeep.compression.selection.threshold_kernels import saturated

BAD, KEPT, PART, SENT, OVERFLOW = 0, 1, 2, 3, 4  # what becomes of a row; from PART on it is sent

_ROWS = types.Array(float32, 2, "C", readonly=True)


@kernel(void(POOL, INTS, INTS, int64[::1], float32[:, ::1], float32[::1]))
def read_states(pool: Pool, starts_T1: Ints, ids_V: Ints, slots_V: Ints, state_VW: Floats, squares_V: Floats) -> None:
    """Slots of a step's rows (-1 = none), their states and sums of squares; zeros of rows without any."""
    heads_SH, floats_SF = k.heads_of(pool), k.floats_of(pool)
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            if (v - starts_T1[t]) % k.ROWS_AT_ONCE == 0:
                k.find_rows(pool, t, ids_V, v, min(v + k.ROWS_AT_ONCE, starts_T1[t + 1]), slots_V)
            slot = slots_V[v]
            if slot >= 0:
                k.touch(pool, slot)
            if slot >= 0 and heads_SH[slot, k.FLAGS] & k.UNSENT:
                squares_V[v] = floats_SF[slot, k.SQUARES]
                for w in range(state_VW.shape[1]):
                    state_VW[v, w] = floats_SF[slot, k.STATE + w]
            else:
                squares_V[v] = np.float32(0.0)
                for w in range(state_VW.shape[1]):
                    state_VW[v, w] = np.float32(0.0)


@kernel(void(_ROWS, float32[:, ::1], float32[::1], float32[::1]))
def measure(grad_VD: Floats, values_VD: Floats, squares_V: Floats, norms_V: Floats) -> None:
    """Norms of values; adds gradients' mean squares to `squares`. A row that is not finite becomes zeros of norm -1."""
    dim = grad_VD.shape[1]
    for v in range(grad_VD.shape[0]):
        total = fresh = 0.0
        for d in range(dim):
            fresh += np.float64(grad_VD[v, d]) * np.float64(grad_VD[v, d])
            total += np.float64(values_VD[v, d]) * np.float64(values_VD[v, d])
        if total < np.inf:
            squares_V[v] = saturated(np.float64(squares_V[v]) + fresh / dim)
            norms_V[v] = saturated(np.sqrt(total))
        else:
            squares_V[v], norms_V[v] = np.float32(0.0), np.float32(-1.0)
            for d in range(dim):
                values_VD[v, d] = np.float32(0.0)


@kernel(void(POOL, float64))
def lose(pool: Pool, total: float) -> None:
    """Counts a residual as lost. `total`: its sum of squares."""
    pool[k.LOST_ROWS] += 1
    pool.view(np.float64)[k.LOST_SQUARES] += total


@kernel(int64(POOL, int64, INTS, INTS, float32[::1], float32[::1], int64[::1], uint8[::1], int64[:, ::1], float32[::1]))
def place(
    pool: Pool,
    dim: int,
    starts_T1: Ints,
    ids_V: Ints,
    squares_V: Floats,
    norms_V: Floats,
    slots_V: Ints,
    fates_V: Bytes,
    victims_E3: Ints,
    squares_E: Floats,
) -> int:
    """Gives slots to rows that wait and have none, in their order: free ones, or that of a residual with a lower norm.
    Marks rows that find none OVERFLOW. Notes residuals that lose theirs and have to be sent: table, id, the slot with
    the state, and squares. Returns the number of these."""
    heads_SH, floats_SF = k.heads_of(pool), k.floats_of(pool)
    count = 0
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            if slots_V[v] >= 0 or not KEPT <= fates_V[v] <= PART:
                continue
            if squares_V[v] == 0.0 and norms_V[v] == 0.0:
                continue  # a gradient of zeros leaves nothing to keep
            slot = k.give_away(pool, False)
            if slot >= 0 and heads_SH[slot, k.FLAGS] & k.UNSENT:
                if not floats_SF[slot, k.SCORE] < norms_V[v]:
                    slot = -1
                elif heads_SH[slot, k.COUNT] > 0:
                    victims_E3[count, 0], victims_E3[count, 1] = heads_SH[slot, k.TABLE], heads_SH[slot, k.ID]
                    victims_E3[count, 2], squares_E[count] = slot, floats_SF[slot, k.SQUARES]
                    count += 1
                else:  # a rounding error alone is not worth its bytes
                    total = 0.0
                    for d in range(dim):
                        total += np.float64(floats_SF[slot, k.STATE + d]) * np.float64(floats_SF[slot, k.STATE + d])
                    lose(pool, total)
            if slot < 0:
                fates_V[v] = OVERFLOW
                continue
            slots_V[v] = slot
            k.occupy(pool, slot, t, ids_V[v])
    return count


@kernel(void(POOL, int64, INTS, INTS, INTS, float32[::1], uint8[::1], int64[::1], _ROWS))
def commit(
    pool: Pool,
    dim: int,
    order_N: Ints,
    tables_R: Ints,
    ids_R: Ints,
    squares_R: Floats,
    fates_R: Bytes,
    slots_R: Ints,
    state_RW: Floats,
) -> None:
    """Writes the states of rows in this order."""
    heads_SH, floats_SF, entries = k.heads_of(pool), k.floats_of(pool), k.index_of(pool)
    for n in range(order_N.size):
        if n + k.AHEAD < order_N.size:
            k.fetch(pool, slots_R, order_N[n + k.AHEAD])
        r = order_N[n]
        slot, table, id_, waits = slots_R[r], tables_R[r], ids_R[r], fates_R[r] == KEPT
        total, left = 0.0, waits
        for w in range(state_RW.shape[1]):
            left = left or state_RW[r, w] != np.float32(0.0)
            if w < dim:
                total += np.float64(state_RW[r, w]) * np.float64(state_RW[r, w])
        if slot < 0 or heads_SH[slot, k.FLAGS] == 0 or heads_SH[slot, k.ID] != id_ or heads_SH[slot, k.TABLE] != table:
            slot = k.find(entries, heads_SH, table, id_)
        keeps = left and total < np.inf
        if keeps and slot < 0 and not waits:
            slot = k.give_away(pool, True)
            if slot >= 0:
                k.occupy(pool, slot, table, id_)
        if not keeps or slot < 0:
            if total != 0.0:
                lose(pool, total)
            if slot >= 0:
                k.settle(pool, slot)
            continue
        k.touch(pool, slot)
        if not heads_SH[slot, k.FLAGS] & k.UNSENT:
            heads_SH[slot, k.FLAGS] |= k.UNSENT
            pool[k.NUM_UNSENT] += 1
        heads_SH[slot, k.COUNT] = heads_SH[slot, k.COUNT] + 1 if fates_R[r] <= PART else 0
        floats_SF[slot, k.SQUARES] = squares_R[r] if waits else np.float32(0.0)
        floats_SF[slot, k.SCORE] = saturated(np.sqrt(total))
        for w in range(state_RW.shape[1]):
            floats_SF[slot, k.STATE + w] = state_RW[r, w]
