"""Kernels of the row pool: which rows are sent, what stays, and what the receiver's rounding leaves behind.

One call for the rows of all tables. Callers check shapes and order and give the log enough room. Sums of squares are in
float64, so that they neither overflow nor vanish.
"""
# T = tables, V = rows of a step, E = rows besides those of the step, K = sent rows, D = embedding dim, S = slots

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.selection.slot_kernels import (
    AHEAD,
    COUNT,
    FLAGS,
    ID,
    LOST_ROWS,
    NUM_UNSENT,
    POOL,
    ROWS_AT_ONCE,
    SCORE,
    SERIAL,
    SQUARES,
    STAMP,
    TABLE,
    UNSENT,
    Pool,
    fetch,
    fetch_entry,
    find,
    find_rows,
    give_away,
    heads_of,
    hold_error,
    index_of,
    occupy,
    rests_of,
    settle,
    stats_of,
    sums_of,
    touch,
)
from shardkeep.compression.selection.threshold_kernels import mark_largest, saturated

KEPT, SENT, BAD = 0, 1, 2  # what becomes of a row
# Columns of the rows besides those of the step; and, float32, of their stats.
EXTRA_TABLE, EXTRA_ID, EXTRA_SLOT = 0, 1, 2
EXTRA_SQUARES, EXTRA_SCORE = 0, 1
EXTRA = 3
# What `select` counts.
NUM_EXTRA, NUM_BAD, NUM_OVERFLOW = 0, 1, 2
COUNTS = 3

_INTS = "Array(int64, 1, 'C', readonly=True)"
_FLOATS = "Array(float32, 1, 'C', readonly=True)"
_ROWS = "Array(float32, 2, 'C', readonly=True)"
_MARKS = "Array(uint8, 1, 'C', readonly=True)"
_EXTRAS = "int64[:,::1], float32[:,::1], float32[:,::1]"


@kernel(f"int64({_INTS}, {_INTS})")
def first_disorder(starts_T1: Ints, ids_V: Ints) -> int:
    """The first position whose id is not above the one before it in its table; -1 when all are sorted and unique."""
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t] + 1, starts_T1[t + 1]):
            if ids_V[v] <= ids_V[v - 1]:
                return v
    return -1


@kernel(f"int64({POOL}, {_INTS}, {_INTS}, {_ROWS}, int64[::1], float32[::1], float32[::1], uint8[::1])")
def score_rows(
    pool: Pool,
    starts_T1: Ints,
    ids_V: Ints,
    grad_VD: Floats,
    slots_V: Ints,
    scores_V: Floats,
    squares_V: Floats,
    fates_V: Bytes,
) -> int:
    """Slots (-1 = none), scores and sums of squares of a step's rows; a row that would not be finite is BAD, with the
    score -1. Returns how many are."""
    heads_SH, stats_SC, rests_SD = heads_of(pool), stats_of(pool), rests_of(pool)
    dim = grad_VD.shape[1]
    bad = 0
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            if (v - starts_T1[t]) % ROWS_AT_ONCE == 0:
                find_rows(pool, t, ids_V, v, min(v + ROWS_AT_ONCE, starts_T1[t + 1]), slots_V)
            slot = slots_V[v]
            total = fresh = squares = 0.0
            if slot >= 0:
                touch(pool, slot)
            if slot >= 0 and heads_SH[slot, FLAGS] & UNSENT:
                squares = np.float64(stats_SC[slot, SQUARES])
                for d in range(dim):
                    value = np.float64(np.float32(grad_VD[v, d] + rests_SD[slot, d]))
                    fresh += np.float64(grad_VD[v, d]) * np.float64(grad_VD[v, d])
                    total += value * value
            else:
                for d in range(dim):
                    total += np.float64(grad_VD[v, d]) * np.float64(grad_VD[v, d])
                fresh = total
            if not total < np.inf:
                bad += 1
                fates_V[v], scores_V[v], squares_V[v] = BAD, np.float32(-1.0), np.float32(0.0)
                continue
            squares_V[v] = saturated(squares + fresh / dim)
            scores_V[v] = saturated(np.sqrt(total))
    return bad


@kernel(f"void({POOL}, int64, int64, {_EXTRAS})")
def add_extra(pool: Pool, slot: int, at: int, extra_heads: Ints, extra_stats: Floats, extra_rows: Floats) -> None:
    """Copies a slot's residual to the rows that are sent besides those of the step."""
    heads_SH, stats_SC, rests_SD = heads_of(pool), stats_of(pool), rests_of(pool)
    extra_heads[at, EXTRA_TABLE], extra_heads[at, EXTRA_ID] = heads_SH[slot, TABLE], heads_SH[slot, ID]
    extra_heads[at, EXTRA_SLOT] = slot
    extra_stats[at, EXTRA_SQUARES], extra_stats[at, EXTRA_SCORE] = stats_SC[slot, SQUARES], stats_SC[slot, SCORE]
    for d in range(rests_SD.shape[1]):
        extra_rows[at, d] = rests_SD[slot, d]


@kernel(f"void({POOL}, int64, {_ROWS}, int64, float32, float32)")
def keep_back(pool: Pool, slot: int, grad_VD: Floats, v: int, squares: np.float32, score: np.float32) -> None:
    """Adds a row's gradient to the residual of its slot."""
    heads_SH, stats_SC, rests_SD = heads_of(pool), stats_of(pool), rests_of(pool)
    if heads_SH[slot, FLAGS] & UNSENT:
        for d in range(rests_SD.shape[1]):
            rests_SD[slot, d] += grad_VD[v, d]
    else:
        heads_SH[slot, FLAGS] |= UNSENT
        pool[NUM_UNSENT] += 1
        for d in range(rests_SD.shape[1]):
            rests_SD[slot, d] = grad_VD[v, d]
    heads_SH[slot, COUNT] += 1
    stats_SC[slot, SQUARES], stats_SC[slot, SCORE] = squares, score


@kernel(f"void({POOL}, int64)")
def lose(pool: Pool, slot: int) -> None:
    """Counts a slot's residual as lost."""
    rests_SD, sums = rests_of(pool), sums_of(pool)
    pool[LOST_ROWS] += 1
    for d in range(rests_SD.shape[1]):
        sums[0] += np.float64(rests_SD[slot, d]) * np.float64(rests_SD[slot, d])


@kernel(
    f"void({POOL}, {_INTS}, {_INTS}, {_ROWS}, int64, {_INTS},"
    f" int64[::1], float32[::1], float32[::1], uint8[::1], {_EXTRAS}, int64[::1])"
)
def select(
    pool: Pool,
    starts_T1: Ints,
    ids_V: Ints,
    grad_VD: Floats,
    count: int,
    flushed: Ints,
    slots_V: Ints,
    scores_V: Floats,
    squares_V: Floats,
    fates_V: Bytes,
    extra_heads: Ints,
    extra_stats: Floats,
    extra_rows: Floats,
    counts: Ints,
) -> None:
    """Decides what becomes of each row of a step (`fates_V`, zeros before) and which residuals are sent besides; keeps
    back what is not sent. `count` rows are chosen by score; residuals of the slots `flushed` are sent, too."""
    heads_SH, stats_SC = heads_of(pool), stats_of(pool)
    counts[:] = 0
    counts[NUM_BAD] = score_rows(pool, starts_T1, ids_V, grad_VD, slots_V, scores_V, squares_V, fates_V)
    mark_largest(scores_V.view(np.int32), count, fates_V)
    for a in range(flushed.size):
        slot = flushed[a]
        if heads_SH[slot, STAMP] != pool[SERIAL]:
            touch(pool, slot)
            add_extra(pool, slot, counts[NUM_EXTRA], extra_heads, extra_stats, extra_rows)
            counts[NUM_EXTRA] += 1
    for t in range(starts_T1.size - 1):
        for v in range(starts_T1[t], starts_T1[t + 1]):
            ahead = v + AHEAD
            if ahead < starts_T1[t + 1] and slots_V[ahead] < 0:
                fetch_entry(pool, t, ids_V[ahead])
            fetch(pool, slots_V, ahead)
            if fates_V[v] != KEPT:
                continue
            slot = slots_V[v]
            if slot < 0:
                if squares_V[v] == 0.0 and scores_V[v] == 0.0:
                    continue  # a gradient of zeros leaves nothing to keep
                slot = give_away(pool, False)
                if slot >= 0 and heads_SH[slot, FLAGS] & UNSENT:
                    if not stats_SC[slot, SCORE] < scores_V[v]:
                        slot = -1
                    elif heads_SH[slot, COUNT] > 0:
                        add_extra(pool, slot, counts[NUM_EXTRA], extra_heads, extra_stats, extra_rows)
                        extra_heads[counts[NUM_EXTRA], EXTRA_SLOT] = -1
                        counts[NUM_EXTRA] += 1
                        counts[NUM_OVERFLOW] += 1
                    else:
                        lose(pool, slot)  # a rounding error alone is not worth its bytes
                if slot < 0:
                    fates_V[v] = SENT
                    counts[NUM_OVERFLOW] += 1
                    continue
                occupy(pool, slot, t, ids_V[v])
            keep_back(pool, slot, grad_VD, v, squares_V[v], scores_V[v])


@kernel(
    f"void({POOL}, {_INTS}, {_INTS}, {_ROWS}, int64[::1], {_FLOATS}, {_FLOATS}, {_MARKS}, int64[:,::1],"
    " float32[:,::1], float32[:,::1], int64[::1], int64[::1], int64[::1], float32[:,::1], float32[::1], float32[::1],"
    " int64[::1])"
)
def gather(
    pool: Pool,
    starts_T1: Ints,
    ids_V: Ints,
    grad_VD: Floats,
    slots_V: Ints,
    scores_V: Floats,
    squares_V: Floats,
    fates_V: Bytes,
    extra_heads: Ints,
    extra_stats: Floats,
    extra_rows: Floats,
    order_E: Ints,
    sent_T1: Ints,
    ids_K: Ints,
    rows_KD: Floats,
    squares_K: Floats,
    scores_K: Floats,
    slots_K: Ints,
) -> None:
    """Writes the sent rows, each table's by id: those of the step, and the others in their order `order_E`."""
    heads_SH, rests_SD = heads_of(pool), rests_of(pool)
    k = e = 0
    for t in range(starts_T1.size - 1):
        sent_T1[t] = k
        v, end = starts_T1[t], starts_T1[t + 1]
        while True:
            while v < end and fates_V[v] != SENT:
                v += 1
            x = order_E[e] if e < order_E.size and extra_heads[order_E[e], EXTRA_TABLE] == t else -1
            if v == end and x < 0:
                break
            if x < 0 or (v < end and ids_V[v] < extra_heads[x, EXTRA_ID]):
                fetch(pool, slots_V, v + AHEAD)
                slot = slots_V[v]
                for d in range(grad_VD.shape[1]):
                    rows_KD[k, d] = grad_VD[v, d]
                if slot >= 0 and heads_SH[slot, FLAGS] & UNSENT:
                    for d in range(grad_VD.shape[1]):
                        rows_KD[k, d] += rests_SD[slot, d]
                ids_K[k], squares_K[k], scores_K[k] = ids_V[v], squares_V[v], scores_V[v]
                v += 1
            else:
                slot = extra_heads[x, EXTRA_SLOT]
                for d in range(extra_rows.shape[1]):
                    rows_KD[k, d] = extra_rows[x, d]
                ids_K[k] = extra_heads[x, EXTRA_ID]
                squares_K[k], scores_K[k] = extra_stats[x, EXTRA_SQUARES], extra_stats[x, EXTRA_SCORE]
                e += 1
            slots_K[k] = slot
            k += 1
    sent_T1[starts_T1.size - 1] = k


@kernel(f"void({POOL}, {_INTS}, {_INTS}, {_ROWS}, {_FLOATS}, int64[::1], {_ROWS})")
def commit(
    pool: Pool,
    sent_T1: Ints,
    ids_K: Ints,
    rows_KD: Floats,
    scores_K: Floats,
    slots_K: Ints,
    decoded_KD: Floats,
) -> None:
    """Replaces the residuals of sent rows by what the receiver misses, rows - decoded."""
    heads_SH, stats_SC, rests_SD = heads_of(pool), stats_of(pool), rests_of(pool)
    entries, sums = index_of(pool), sums_of(pool)
    dim = rows_KD.shape[1]
    for t in range(sent_T1.size - 1):
        for k in range(sent_T1[t], sent_T1[t + 1]):
            total = error = 0.0
            for d in range(dim):
                off = np.float64(np.float32(rows_KD[k, d] - decoded_KD[k, d]))
                total += np.float64(rows_KD[k, d]) * np.float64(rows_KD[k, d])
                error += off * off
            fetch(pool, slots_K, k + AHEAD)
            slot = slots_K[k]
            if slot < 0 or heads_SH[slot, FLAGS] == 0 or heads_SH[slot, ID] != ids_K[k] or heads_SH[slot, TABLE] != t:
                slot = find(entries, heads_SH, t, ids_K[k])
            keeps = 0.0 < error < np.inf
            if keeps and slot < 0:
                slot = give_away(pool, True)
                keeps = slot >= 0
                if keeps:
                    occupy(pool, slot, t, ids_K[k])
            if not keeps:
                if error != 0.0:
                    pool[LOST_ROWS] += 1
                    sums[0] += error
                if slot >= 0:
                    settle(pool, slot)
                continue
            hold_error(pool, slot)
            for d in range(dim):
                rests_SD[slot, d] = rows_KD[k, d] - decoded_KD[k, d]
            weight = np.float64(scores_K[k]) / np.sqrt(total) if total > 0.0 else 1.0
            stats_SC[slot, SCORE] = saturated(weight * np.sqrt(error))
