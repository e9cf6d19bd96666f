"""Kernels of admission: which absent ids of a push become rows, and the counts of those that do not."""
# S = sections, T = tables, V = ids of all sections, A = absent ids of a section, E = tables from which rows go

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Bools, Float64s, Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix
from shardkeep.ps.shard.table.layout_kernels import record
from shardkeep.ps.shard.table.policy_kernels import CAPACITY, Matrix, remove_counted, reset_counters, touch
from shardkeep.ps.shard.table.pre_image_kernels import ROWS as SNAPSHOT_ROWS
from shardkeep.ps.shard.table.pre_image_kernels import keep
from shardkeep.ps.shard.table.table_kernels import (
    ADDRESSES,
    ADMITTED,
    COUNT,
    COUNTERS,
    KEY,
    NUM_ADDRESSES,
    NUM_CHANGED,
    REFUSED,
    SHIFT,
    WIDTH,
    Descriptors,
    Images,
    add_rows,
    note_changes,
)


@kernel("void(int64[::1], uint64, int64, float64, boolean[::1])")
def draw(ids_A: Ids, key: np.uint64, step: int, chance: float, drawn_A: Bools) -> None:
    """True with a chance, by a hash of (key, id, step)."""
    base = mix(key ^ mix(np.uint64(step) + GOLDEN))
    for i in range(ids_A.size):
        bits = mix(base ^ mix(np.uint64(ids_A[i]) + GOLDEN))
        drawn_A[i] = np.float64(bits >> np.uint64(11)) * 2.0**-53 < chance


@kernel("void(int64[::1], float32[::1], int64[::1], int64[::1], int64, float32[::1], int64[::1], float32[::1])")
def count_candidates(
    descriptor: Ints,
    start: Rows,
    images: Ints,
    ids_A: Ids,
    clock: int,
    pushes_A: Rows,
    slots_A: Ints,
    counts_A: Rows,
) -> None:
    """Counts ids in a table whose rows only count, and adds their rows, for which there is room. Gives their slots and
    counts. A snapshot keeps the rows as they were (there is room)."""
    before = descriptor[COUNT]
    add_rows(descriptor, start, ids_A, slots_A, False)
    reset_counters(descriptor, before)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width = descriptor[SHIFT], descriptor[WIDTH]
    if images[SNAPSHOT_ROWS]:
        keep(images, addresses, shift, width, slots_A)
    if descriptor[NUM_CHANGED]:
        note_changes(descriptor, slots_A)
    touch(descriptor, slots_A, clock, pushes_A, 0.0)
    for i in range(slots_A.size):
        counts_A[i] = record(addresses, shift, width, slots_A[i])[descriptor[COUNTERS] + 1]


@kernel(
    "int64(int64[:,::1], float32[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " float32[::1], int64, int64[::1], int64[::1], int64[::1], float64[::1], float64[:,::1], int64[:,::1], int64[::1],"
    " int64[:,::1], int64[::1], int64[::1])"
)
def decide(
    descriptors: Descriptors,
    starts: Rows,
    images: Images,
    tables_S: Ints,
    starts_S1: Ints,
    ids_V: Ids,
    slots_V: Ints,
    absent_S: Ints,
    pushes_V: Rows,
    step: int,
    clocks_T: Ints,
    counting_T: Ints,
    evicting_T: Ints,
    bars_T: Float64s,
    rules_T: Matrix,
    counts_EB: Descriptors,
    counted_E: Ints,
    over_EB: Descriptors,
    num_over_E: Ints,
    places: Ints,
) -> int:
    """The places of the ids that become rows, which rise, and their number. They leave the tables that count; tables
    count those that were admitted and refused.

    `absent_S`: ids of each section without a row; their slots are -1. `counting_T`: the table that counts these ids; -1
    = they are drawn by chance. `bars_T`: the least count, or the chance. `evicting_T`: the number e of a table."""
    num_places = 0
    for s in range(tables_S.size):
        if absent_S[s] == 0:
            continue
        t = tables_S[s]
        at_A, ids_A = np.empty(absent_S[s], np.int64), np.empty(absent_S[s], np.int64)
        a = 0
        for v in range(starts_S1[s], starts_S1[s + 1]):
            if slots_V[v] < 0:
                at_A[a], ids_A[a] = v, ids_V[v]
                a += 1
        chosen_A, c = np.empty(a, np.bool_), counting_T[t]
        if c < 0:
            draw(ids_A, np.uint64(descriptors[t, KEY]), step, bars_T[t], chosen_A)
        else:
            slots_A, counts_A = np.empty(a, np.int64), np.empty(a, np.float32)
            pushes_A = pushes_V[at_A] if pushes_V.size else pushes_V
            count_candidates(descriptors[c], starts[c], images[c], ids_A, clocks_T[c], pushes_A, slots_A, counts_A)
            for i in range(a):
                chosen_A[i] = counts_A[i] >= bars_T[t]
            if chosen_A.any():
                remove_counted(
                    descriptors[c], images[c], slots_A[chosen_A], int(rules_T[c, CAPACITY]), evicting_T[c], counts_EB,
                    counted_E, over_EB, num_over_E,
                )  # fmt: skip
        before = num_places
        for i in range(a):
            if chosen_A[i]:
                places[num_places] = at_A[i]
                num_places += 1
        descriptors[t, ADMITTED] += num_places - before
        descriptors[t, REFUSED] += a - (num_places - before)
    return num_places
