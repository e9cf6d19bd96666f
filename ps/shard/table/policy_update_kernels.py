"""The update of a push in tables with policies: check, look-up, optimizer and counters of some rows at a time.

A row is in the processor's cache from its check to its counters. Rows that admission has to decide on are left out.
"""
# S = sections, V = ids of all sections, U = ids of a section, K = ids of a block, D = embedding dim

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Bools, Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.shard.table.index_kernels import find
from shardkeep.ps.shard.table.layout_kernels import id_of, prefetch_record
from shardkeep.ps.shard.table.policy_kernels import LOG_DECAY, Matrix, reset_counters, touch
from shardkeep.ps.shard.table.table_kernels import (
    ADDRESSES,
    COUNT,
    COUNTERS,
    DIM,
    ENTRIES,
    NUM_ADDRESSES,
    NUM_ENTRIES,
    NUM_OLD,
    OLD,
    SHIFT,
    WIDTH,
    Descriptors,
    Images,
    update_section,
)

ROWS_AT_ONCE = 128
"""Rows of a block. With their gradients they fit into the first cache for usual dims."""


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int64)")
def forget_moved(descriptor: Ints, ids_U: Ids, slots_U: Ints, begin: int, end: int) -> None:
    """-1 for remembered slots [begin, end) that now have another row, or none. Fetches the rows into the cache."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, count = descriptor[SHIFT], descriptor[WIDTH], descriptor[COUNT]
    for i in range(begin, end):
        prefetch_record(addresses, shift, width, slots_U, i)  # also of the next block
        slot = slots_U[i]
        if slot >= count or (slot >= 0 and id_of(addresses, shift, width, slot) != ids_U[i]):
            slots_U[i] = -1


@kernel("int64(int64[::1], int64[::1], int64[::1], int64[::1], boolean[::1])")
def find_missing(descriptor: Ints, ids_K: Ids, slots_K: Ints, ids: Ints, absent_K: Bools) -> int:
    """Looks up the ids whose slot is -1. Returns how many have no row, and sets which. `ids`: scratch of two blocks."""
    count, size = 0, ids_K.size
    for i in range(size):
        absent_K[i] = slots_K[i] < 0
        if slots_K[i] < 0:
            ids[count] = ids_K[i]
            count += 1
    if not count:
        return 0
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    slots = ids[size : size + count]
    find(entries, old, ids[:count], addresses, descriptor[SHIFT], descriptor[WIDTH], slots)
    count = at = 0
    for i in range(size):
        if absent_K[i]:
            slots_K[i] = slots[at]
            absent_K[i] = slots[at] < 0
            count += absent_K[i]
            at += 1
    return count


@kernel("float32[:,::1](float32[:,::1], boolean[::1])")
def _rows_of(rows_KD: Rows, kept_K: Bools) -> Rows:
    """The rows that are kept, copied."""
    found_KD = np.empty(rows_KD.shape, np.float32)
    count = 0
    for i in range(kept_K.size):
        if kept_K[i]:
            for d in range(rows_KD.shape[1]):
                found_KD[count, d] = rows_KD[i, d]
            count += 1
    return found_KD[:count]


@kernel(
    "int64(int64[::1], float32[::1], int64[::1], int64[::1], int64[::1], boolean, float32[:,::1], float32[::1],"
    " float32[::1], float32[::1], int64, float64, boolean)"
)
def _apply_by_blocks(
    descriptor: Ints,
    start: Rows,
    images: Ints,
    ids_U: Ids,
    slots_U: Ints,
    found: bool,
    grad_UD: Rows,
    squares_U: Rows,
    scalars: Rows,
    pushes_U: Rows,
    clock: int,
    log_decay: float,
    admits: bool,
) -> int:
    """Returns the number of absent rows, which are left out."""
    num_absent = 0
    absent_K, ids = np.empty(ROWS_AT_ONCE, np.bool_), np.empty(2 * ROWS_AT_ONCE, np.int64)
    for begin in range(0, ids_U.size, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, ids_U.size)
        ids_K, slots_K, grad_KD = ids_U[begin:end], slots_U[begin:end], grad_UD[begin:end]
        squares_K = squares_U[begin:end] if squares_U.size else squares_U
        pushes_K = pushes_U[begin:end] if pushes_U.size else pushes_U
        if not found:
            slots_K[:] = -1
        elif descriptor[COUNTERS]:
            forget_moved(descriptor, ids_U, slots_U, begin, end)
        if admits:
            absent = find_missing(descriptor, ids_K, slots_K, ids, absent_K)
            num_absent += absent
            if absent == ids_K.size:
                continue
            if absent:
                kept = ~absent_K[: ids_K.size]
                ids_K, slots_K, grad_KD = ids_K[kept], slots_K[kept], _rows_of(grad_KD, kept)
                squares_K = squares_K[kept] if squares_K.size else squares_K
                pushes_K = pushes_K[kept] if pushes_K.size else pushes_K
        before = descriptor[COUNT]
        update_section(descriptor, start, images, ids_K, slots_K, found or admits, grad_KD, squares_K, scalars)
        if descriptor[COUNTERS]:
            reset_counters(descriptor, before)
            touch(descriptor, slots_K, clock, pushes_K, log_decay)
    return num_absent


@kernel(
    "void(int64[:,::1], float32[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], boolean,"
    " float32[::1], float32[::1], float32[:,::1], float32[::1], int64[::1], float64[:,::1], boolean[::1], int64[::1])"
)
def apply(
    descriptors: Descriptors,
    starts: Rows,
    images: Images,
    tables_S: Ints,
    starts_S1: Ints,
    ids_V: Ints,
    slots_V: Ints,
    found: bool,
    values: Rows,
    squares_V: Rows,
    scalars_SK: Rows,
    pushes_V: Rows,
    clocks_T: Ints,
    rules_T: Matrix,
    admits_T: Bools,
    absent_S: Ints,
) -> None:
    """As `table_kernels.apply`, where rows may have moved since the pull whose slots are given, and counts the pushes
    of rows with counters. In tables with `admits` no row is added: the slots of absent ones become -1, and `absent` has
    their number in each section."""
    at = 0
    for s in range(tables_S.size):
        t = tables_S[s]
        descriptor = descriptors[t]
        first, last = starts_S1[s], starts_S1[s + 1]
        end = at + (last - first) * descriptor[DIM]
        grad_UD = values[at:end].reshape((last - first, descriptor[DIM]))
        squares_U = squares_V[first:last] if squares_V.size else squares_V
        if squares_U.size and np.isnan(squares_U[0]):  # then so are all of the table
            squares_U = squares_U[:0]
        pushes_U = pushes_V[first:last] if pushes_V.size else pushes_V
        absent_S[s] = 0
        if descriptor[COUNTERS] or admits_T[t]:
            absent_S[s] = _apply_by_blocks(
                descriptor, starts[t], images[t], ids_V[first:last], slots_V[first:last], found, grad_UD, squares_U,
                scalars_SK[s], pushes_U, clocks_T[t], rules_T[t, LOG_DECAY], admits_T[t],
            )  # fmt: skip
        else:
            update_section(
                descriptor, starts[t], images[t], ids_V[first:last], slots_V[first:last], found, grad_UD, squares_U,
                scalars_SK[s],
            )  # fmt: skip
        at = end


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], float32[::1], float32[::1])")
def take_rows(starts_S1: Ints, taken_S1: Ints, dims_S: Ints, places: Ints, values: Rows, taken: Rows) -> None:
    """Copies the values of the ids at some places. `taken_S1`: where the sections begin in `places`."""
    at = to = 0
    for s in range(dims_S.size):
        dim = dims_S[s]
        for i in range(taken_S1[s], taken_S1[s + 1]):
            first = at + (places[i] - starts_S1[s]) * dim
            taken[to : to + dim] = values[first : first + dim]
            to += dim
        at += (starts_S1[s + 1] - starts_S1[s]) * dim
