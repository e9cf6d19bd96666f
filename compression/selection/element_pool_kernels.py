"""Kernels of the element pool: gradients added to what is unsent, with momentum correction.

A slot's residual holds v, D values, and with momentum u behind it, D more. Callers check shapes and order.
"""
# T = tables, V = rows of a step, E = rows besides those of the step, D = embedding dim

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.selection.slot_kernels import (
    COUNT,
    FLAGS,
    ID,
    NUM_UNSENT,
    POOL,
    ROWS_AT_ONCE,
    SCORE,
    TABLE,
    UNSENT,
    Pool,
    find_rows,
    give_away,
    heads_of,
    occupy,
    rests_of,
    settle,
    stats_of,
    touch,
)
from shardkeep.compression.selection.threshold_kernels import saturated

BAD, NONE = -2, -1  # instead of a slot: a row that is left out; a row whose elements are all sent

_INTS = "Array(int64, 1, 'C', readonly=True)"
_ROWS = "Array(float32, 2, 'C', readonly=True)"


@kernel(
    f"int64({POOL}, {_INTS}, {_INTS}, {_ROWS}, float32, float32, boolean, int64[::1], float32[:,::1],"
    " int64[:,::1], float32[:,::1])"
)
def accumulate(
    pool: Pool,
    starts_T1: Ints,
    ids_V: Ints,
    grad_VD: Floats,
    factor: np.float32,
    momentum: np.float32,
    nesterov: bool,
    slots_V: Ints,
    values_VD: Floats,
    extra_E2: Ints,
    extra_ED: Floats,
) -> int:
    """Adds factor * gradient to u and v of each row; `values` gets v, zeros for a BAD row, whose state stays as it is.

    A new row takes a slot as in the row pool: that of a row with a lower norm of v, whose v then goes to the extras
    (table and id, v); or none, and it is sent whole. Returns how many extras there are."""
    heads_SH, stats_SC, rests_SW = heads_of(pool), stats_of(pool), rests_of(pool)
    dim = grad_VD.shape[1]
    zero = np.float32(0.0)
    u_D = np.empty(dim, dtype=np.float32)
    extras = 0
    for t in range(starts_T1.size - 1):
        for begin in range(starts_T1[t], starts_T1[t + 1], ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, starts_T1[t + 1])
            find_rows(pool, t, ids_V, begin, end, slots_V)
            for v in range(begin, end):
                if slots_V[v] >= 0:
                    touch(pool, slots_V[v])
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            slot = slots_V[v]
            total = 0.0
            for d in range(dim):
                gradient = factor * grad_VD[v, d]
                before_u = rests_SW[slot, dim + d] if slot >= 0 and momentum > zero else zero
                before_v = rests_SW[slot, d] if slot >= 0 else zero
                u_D[d] = momentum * (before_u + gradient) if nesterov else momentum * before_u + gradient
                values_VD[v, d] = before_v + u_D[d] + gradient if nesterov else before_v + u_D[d]
                total += np.float64(values_VD[v, d]) * np.float64(values_VD[v, d])
            if not total < np.inf:
                slots_V[v] = BAD
                values_VD[v, :] = zero
                continue
            if slot < 0:
                if total == 0.0:
                    continue
                slot = give_away(pool, False)
                if slot >= 0 and heads_SH[slot, FLAGS] & UNSENT:
                    if stats_SC[slot, SCORE] < saturated(np.sqrt(total)):
                        extra_E2[extras, 0], extra_E2[extras, 1] = heads_SH[slot, TABLE], heads_SH[slot, ID]
                        for d in range(dim):
                            extra_ED[extras, d] = rests_SW[slot, d]
                        extras += 1
                    else:
                        slot = -1
                if slot < 0:
                    continue
                occupy(pool, slot, t, ids_V[v])
                heads_SH[slot, FLAGS] |= UNSENT
                pool[NUM_UNSENT] += 1
                rests_SW[slot, :] = zero
                slots_V[v] = slot
            heads_SH[slot, COUNT] += 1
            stats_SC[slot, SCORE] = saturated(np.sqrt(total))
            for d in range(dim):
                rests_SW[slot, d] = values_VD[v, d]
                if momentum > zero:
                    rests_SW[slot, dim + d] = u_D[d]
    return extras


@kernel(f"void({POOL}, {_INTS})")
def touch_all(pool: Pool, slots_K: Ints) -> None:
    """Call it before slots change outside a kernel."""
    for k in range(slots_K.size):
        touch(pool, slots_K[k])


@kernel(f"void({POOL}, {_INTS}, int64)")
def settle_zeros(pool: Pool, slots_K: Ints, dim: int) -> None:
    """Frees the slots in which nothing is left; others get the norm of v as their score."""
    stats_SC, rests_SW = stats_of(pool), rests_of(pool)
    for k in range(slots_K.size):
        slot = slots_K[k]
        total, left = 0.0, False
        for w in range(rests_SW.shape[1]):
            left = left or rests_SW[slot, w] != np.float32(0.0)
            if w < dim:
                total += np.float64(rests_SW[slot, w]) * np.float64(rests_SW[slot, w])
        if left:
            stats_SC[slot, SCORE] = saturated(np.sqrt(total))
        else:
            settle(pool, slot)
