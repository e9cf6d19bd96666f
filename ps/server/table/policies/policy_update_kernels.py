"""The update of a push in tables with policies: check, look-up, optimizer and counters of some rows at a time.

A row is in the processor's cache from its check to its counters. Rows that admission has to decide on are left out.
"""
# S = sections, V = ids of all sections, U = ids of a section, K = ids of a block, D = embedding dim

from __future__ import annotations

import numpy as np
from numba.core.types import boolean, int64, void

from shardkeep.base.arrays import Bools, Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import FLOATS, INTS, ROWS, TABLE, Descriptor
from shardkeep.ps.server.table.index_kernels import find
from shardkeep.ps.server.table.layout_kernels import id_of, prefetch_record
from shardkeep.ps.server.table.policies.policy_kernels import reset_counters, touch
from shardkeep.ps.server.table.table_kernels import update_section

_BOOLS = boolean[::1]

ROWS_AT_ONCE = 128
"""Rows of a block. With their gradients they fit into the first cache for usual dims."""


@kernel(void(TABLE, INTS, INTS, int64, int64))
def forget_moved(table: Descriptor, ids_U: Ids, slots_U: Ints, begin: int, end: int) -> None:
    """-1 for remembered slots [begin, end) that now have another row, or none. Fetches the rows into the cache."""
    for i in range(begin, end):
        prefetch_record(table.blocks, slots_U, i)  # also of the next block
        slot = slots_U[i]
        if slot >= table.count or (slot >= 0 and id_of(table.blocks, slot) != ids_U[i]):
            slots_U[i] = -1


@kernel(int64(TABLE, INTS, INTS, INTS, _BOOLS))
def find_missing(table: Descriptor, ids_K: Ids, slots_K: Ints, ids: Ints, absent_K: Bools) -> int:
    """Looks up the ids whose slot is -1. Returns how many have no row, and sets which. `ids`: scratch of two blocks."""
    count, size = 0, ids_K.size
    for i in range(size):
        absent_K[i] = slots_K[i] < 0
        if slots_K[i] < 0:
            ids[count] = ids_K[i]
            count += 1
    if not count:
        return 0
    slots = ids[size : size + count]
    find(table, ids[:count], slots)
    count = at = 0
    for i in range(size):
        if absent_K[i]:
            slots_K[i] = slots[at]
            absent_K[i] = slots[at] < 0
            count += absent_K[i]
            at += 1
    return count


@kernel(void(TABLE, INTS, INTS, boolean, ROWS, FLOATS, FLOATS, boolean, INTS))
def update(
    table: Descriptor,
    ids_U: Ids,
    slots_U: Ints,
    pulled: bool,
    grad_UD: Rows,
    scalars: Rows,
    pushes_U: Rows,
    admits: bool,
    absent_1: Ints,
) -> None:
    """`table_kernels.apply` for ids of one table with policies, whose rows may have moved since the pull whose slots
    are given. Counts the pushes of rows with counters. `admits`: leaves absent rows out, and adds their number."""
    absent_K, ids = np.empty(ROWS_AT_ONCE, np.bool_), np.empty(2 * ROWS_AT_ONCE, np.int64)
    for begin in range(0, ids_U.size, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, ids_U.size)
        ids_K, slots_K, grad_KD = ids_U[begin:end], slots_U[begin:end], grad_UD[begin:end]
        pushes_K = pushes_U[begin:end] if pushes_U.size else pushes_U
        if not pulled:
            slots_K[:] = -1
        elif table.policies.counters:
            forget_moved(table, ids_U, slots_U, begin, end)
        if admits:
            absent = find_missing(table, ids_K, slots_K, ids, absent_K)
            absent_1[0] += absent
            if absent == ids_K.size:
                continue
            if absent:
                kept = np.flatnonzero(~absent_K[: ids_K.size])
                ids_K, slots_K, grad_KD = ids_K[kept], slots_K[kept], grad_KD[kept]
                pushes_K = pushes_K[kept] if pushes_K.size else pushes_K
        before = table.count
        update_section(table, ids_K, slots_K, pulled or admits, grad_KD, scalars)
        if table.policies.counters:
            reset_counters(table, before)
            touch(table, slots_K, pushes_K)
