"""Kernels of admission: which absent ids of a push become rows, and the counts of those that do not."""
# U = ids of a section, A = those without a row

from __future__ import annotations

import numpy as np
from numba.core.types import int64, void

from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import FLOATS, INTS, ROWS, TABLE, TABLES, Descriptor, Descriptors
from shardkeep.ps.server.table.layout_kernels import record
from shardkeep.ps.server.table.policies.policy_kernels import count_rows, remove_rows, reset_counters, touch
from shardkeep.ps.server.table.policies.policy_update_kernels import update
from shardkeep.ps.server.table.pre_image_kernels import keep
from shardkeep.ps.server.table.table_kernels import add_rows, note_changes


@kernel(void(TABLE, INTS, FLOATS, INTS, FLOATS))
def count_candidates(table: Descriptor, ids_A: Ids, pushes_A: Rows, slots_A: Ints, counts_A: Rows) -> None:
    """Counts ids in a table whose rows only count, and adds their rows, for which there is room. Gives their slots and
    counts. A snapshot keeps the rows as they were (there is room)."""
    before = table.count
    add_rows(table, ids_A, slots_A, False)
    reset_counters(table, before)
    if table.images.rows:
        keep(table, slots_A)
    if table.changed:
        note_changes(table, slots_A)
    touch(table, slots_A, pushes_A)
    for i in range(slots_A.size):
        counts_A[i] = record(table.blocks, slots_A[i])[table.policies.counters + 1]


@kernel(int64(TABLES, TABLES, INTS, INTS, FLOATS, INTS))
def decide(
    tables: Descriptors, counting_tables: Descriptors, ids_U: Ids, slots_U: Ints, pushes_U: Rows, places_A: Ints
) -> int:
    """The places of the ids that become rows of the first table, which rise; returns their number. They leave the first
    of `counting_tables`, which counts. `places_A`: room for all ids without a row, whose slots are -1."""
    table: Descriptor = tables[0]
    counting: Descriptor = counting_tables[0]
    a = 0
    for u in range(ids_U.size):
        if slots_U[u] < 0:
            places_A[a] = u
            a += 1
    counting.policies.rules.clock = table.step
    slots_A, counts_A = np.empty(a, np.int64), np.empty(a, np.float32)
    count_candidates(counting, ids_U[places_A], pushes_U[places_A] if pushes_U.size else pushes_U, slots_A, counts_A)
    chosen_A = counts_A >= table.policies.rules.min_count
    if chosen_A.any():
        count_rows(counting)
        remove_rows(counting, slots_A[chosen_A])
    count = 0
    for i in range(a):
        if chosen_A[i]:
            places_A[count] = places_A[i]
            count += 1
    table.policies.admitted_rows += count
    table.policies.refused_rows += a - count
    return count


@kernel(void(TABLES, INTS, INTS, INTS, ROWS, FLOATS, FLOATS))
def admit(
    tables: Descriptors, places_A: Ints, ids_U: Ids, slots_U: Ints, grad_UD: Rows, scalars: Rows, pushes_U: Rows
) -> None:
    """Adds and updates the rows of some ids of the first table, and sets their slots."""
    slots_A, none = np.full(places_A.size, -1, np.int64), np.empty(0, np.int64)
    grad_AD, pushes_A = grad_UD[places_A], pushes_U[places_A] if pushes_U.size else pushes_U
    update(tables[0], ids_U[places_A], slots_A, False, grad_AD, scalars, pushes_A, False, none)
    slots_U[places_A] = slots_A
