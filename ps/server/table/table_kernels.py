"""Kernels over several tables at once: pull and apply, one call for all sections of a message.

The callers keep alive what the tables' descriptors (descriptor_kernels.py) have addresses of, have made room for new
rows, and hold the tables' locks.
"""
# S = sections, V = ids of all sections, A = tables whose every row decays, D = embedding dim

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import boolean, int64, void
from numba.extending import intrinsic

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import (
    BLOCKS,
    CURSORS,
    FLOATS,
    INTS,
    ROWS,
    TABLE,
    TABLES,
    Cursors,
    Descriptor,
    Descriptors,
)
from shardkeep.ps.server.table.index_kernels import find, find_or_add
from shardkeep.ps.server.table.pre_image_kernels import keep
from shardkeep.ps.server.table.row_kernels import gather, initialise, mark_new

_0, _1 = np.uint64(0), np.uint64(1)
ROWS_AT_ONCE = 1024
"""Of a table that decays."""


def _call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that calls the kernel whose address is the first argument. It returns nothing and raises nothing."""
    kinds = signature.args[1:]
    code = builder.inttoptr(args[0], context.call_conv.get_function_type(void, kinds).as_pointer())
    context.call_conv.call_function(builder, code, void, kinds, args[1:])
    return context.get_dummy_value()


def _call_optimizer(
    _typing: Any, _code: Any, _blocks: Any, _dim: Any, _slots_U: Any, _grad_UD: Any, _scalars: Any
) -> Any:
    """Calls an optimizer's kernel by its address: `apply` is compiled without any optimizer."""
    return void(int64, BLOCKS, int64, INTS, ROWS, FLOATS), _call


def _call_pull(_typing: Any, _code: Any, _table: Any, _ids_U: Any, _slots_U: Any, _rows_UD: Any) -> Any:
    """Calls the kernel that reads packed rows, which other tables do without."""
    return void(int64, TABLE, INTS, INTS, ROWS), _call


def _call_update(_typing: Any, _code: Any, _table: Any, _slots_U: Any, _grad_UD: Any, _scalars: Any) -> Any:
    """Calls the kernel that updates packed rows."""
    return void(int64, TABLE, INTS, ROWS, FLOATS), _call


def _call_policy_update(
    _typing: Any,
    _code: Any,
    _table: Any,
    _ids_U: Any,
    _slots_U: Any,
    _pulled: Any,
    _grad_UD: Any,
    _scalars: Any,
    _pushes_U: Any,
    _admits: Any,
    _absent_1: Any,
) -> Any:
    """Calls the kernel that updates rows of a table with policies."""
    kinds = (TABLE, INTS, INTS, boolean, ROWS, FLOATS, FLOATS, boolean, INTS)
    return void(int64, *kinds), _call


call_optimizer: Any = intrinsic(_call_optimizer)
call_pull: Any = intrinsic(_call_pull)
call_update: Any = intrinsic(_call_update)
call_policy_update: Any = intrinsic(_call_policy_update)


@kernel(void(TABLES, INTS, INTS, INTS, INTS, INTS, FLOATS))
def pull(
    tables: Descriptors, tables_S: Ints, starts_S1: Ints, ids_V: Ints, slots_V: Ints, absent_S: Ints, values: Rows
) -> None:
    """Weights of all ids, table after table, into `values`; the slots of the rows, -1 for those that are not there,
    and how many these are in each section."""
    at = 0
    for s in range(tables_S.size):
        table: Descriptor = tables[tables_S[s]]
        ids_U, slots_U = ids_V[starts_S1[s] : starts_S1[s + 1]], slots_V[starts_S1[s] : starts_S1[s + 1]]
        find(table, ids_U, slots_U)
        end = at + ids_U.size * table.dim
        rows_UD = values[at:end].reshape((ids_U.size, table.dim))
        if table.packed.pull:
            call_pull(table.packed.pull, table, ids_U, slots_U, rows_UD)
        else:
            gather(table, ids_U, slots_U, rows_UD)
        absent_S[s] = (slots_U < 0).sum()
        at = end


@kernel(void(TABLE, INTS, INTS, boolean))
def add_rows(table: Descriptor, ids_U: Ints, slots_U: Ints, pulled: bool) -> None:
    """Slots of ids; absent ones become rows with their initial values, or with the mark of new ones where values have
    fewer than 32 bits: what writes them next starts from the initial values."""
    before = table.count
    if pulled:
        for i in range(ids_U.size):
            if slots_U[i] < 0:
                find_or_add(table, ids_U[i : i + 1], slots_U[i : i + 1])
    else:
        find_or_add(table, ids_U, slots_U)
    if table.count > before:
        if table.packed.mark:
            mark_new(table, slots_U, before)
        else:
            initialise(table, ids_U, slots_U, before)


@kernel(void(TABLE, INTS))
def note_changes(table: Descriptor, slots_U: Ints) -> None:
    """Sets the bits of rows that change."""
    changed = carray(pointer(table.changed), ((table.count + 7) // 8,), np.uint8)
    for i in range(slots_U.size):
        changed[slots_U[i] >> 3] |= np.uint8(1 << (slots_U[i] & 7))


@kernel(void(TABLE, INTS, ROWS, FLOATS))
def update(table: Descriptor, slots_U: Ints, grad_UD: Rows, scalars: Rows) -> None:
    """One update by the table's optimizer. A mean square may follow a row's gradient (shared_kernels.py). The only way
    in which a row changes while a server serves."""
    if table.changed:
        note_changes(table, slots_U)
    if table.packed.update:
        call_update(table.packed.update, table, slots_U, grad_UD, scalars)
    else:
        call_optimizer(table.optimizer.code, table.blocks, table.dim, slots_U, grad_UD, scalars)


@kernel(void(TABLE, INTS, INTS, boolean, ROWS, FLOATS))
def update_section(table: Descriptor, ids_U: Ints, slots_U: Ints, pulled: bool, grad_UD: Rows, scalars: Rows) -> None:
    """`apply` for ids of one table without policies."""
    add_rows(table, ids_U, slots_U, pulled)
    if table.images.rows:
        keep(table, slots_U)
    update(table, slots_U, grad_UD, scalars)


@kernel(void(TABLES, INTS, INTS, INTS, INTS, boolean, FLOATS, ROWS, FLOATS, INTS))
def apply(
    tables: Descriptors,
    tables_S: Ints,
    starts_S1: Ints,
    ids_V: Ints,
    slots_V: Ints,
    pulled: bool,
    values: Rows,
    scalars_SK: Rows,
    pushes_V: Rows,
    absent_S: Ints,
) -> None:
    """One optimizer update of all ids' rows; absent rows are added first, and those that a snapshot wants are kept as
    they were (pre_image_kernels.py; there is room for them). `values`: the gradients, table after table, `width`
    values a row. `pushes_V`: the pushes of each row, for tables with policies; empty = one each.

    `pulled`: the slots are those of an earlier `pull`, so that only those that were absent then are looked up. In
    tables with admission no row is added: the slots of absent ones become -1, and `absent_S` has their number in each
    section."""
    at = 0
    for s in range(tables_S.size):
        table: Descriptor = tables[tables_S[s]]
        first, last = starts_S1[s], starts_S1[s + 1]
        ids_U, slots_U = ids_V[first:last], slots_V[first:last]
        end = at + ids_U.size * table.width
        grad_UD = values[at:end].reshape((ids_U.size, table.width))
        absent_S[s] = 0
        if table.policies.update:
            pushes_U = pushes_V[first:last] if pushes_V.size else pushes_V
            call_policy_update(
                table.policies.update, table, ids_U, slots_U, pulled, grad_UD, scalars_SK[s], pushes_U,
                table.policies.rules.min_count > 0, absent_S[s : s + 1],
            )  # fmt: skip
        else:
            update_section(table, ids_U, slots_U, pulled, grad_UD, scalars_SK[s])
        at = end


@kernel(void(TABLE, INTS, FLOATS))
def decay(table: Descriptor, slots_U: Ints, scalars: Rows) -> None:
    """One optimizer update with gradient 0."""
    if table.images.rows:
        keep(table, slots_U)
    update(table, slots_U, np.zeros((slots_U.size, table.dim), np.float32), scalars)


@kernel(void(TABLES, INTS, INTS, INTS, INTS, ROWS))
def decay_others(
    tables: Descriptors, tables_A: Ints, tables_S: Ints, starts_S1: Ints, slots_V: Ints, scalars_TK: Rows
) -> None:
    """Decays the rows of some tables, except those in `slots_V`, where -1 is no row. There is room for pre-images."""
    slots_U = np.empty(ROWS_AT_ONCE, np.int64)
    for a in range(tables_A.size):
        table: Descriptor = tables[tables_A[a]]
        others_N = np.ones(table.count, np.bool_)
        for s in range(np.searchsorted(tables_S, tables_A[a]), np.searchsorted(tables_S, tables_A[a], "right")):
            for i in range(starts_S1[s], starts_S1[s + 1]):
                if slots_V[i] >= 0:
                    others_N[slots_V[i]] = False
        count = 0
        for slot in range(table.count):
            slots_U[count] = slot
            count += others_N[slot]
            if count == ROWS_AT_ONCE or (count and slot + 1 == table.count):
                decay(table, slots_U[:count], scalars_TK[tables_A[a]])
                count = 0


@kernel(void(CURSORS, int64, INTS, INTS, INTS, FLOATS))
def begin_push(pushes: Cursors, p: int, tables_S: Ints, starts_S1: Ints, ids_V: Ints, values: Rows) -> None:
    """Sets a push's cursor to its first section. The caller keeps the arrays alive."""
    pushes[p].sections, pushes[p].tables = tables_S.size, tables_S.ctypes.data
    pushes[p].starts, pushes[p].ids, pushes[p].values = starts_S1.ctypes.data, ids_V.ctypes.data, values.ctypes.data


@kernel(int64(CURSORS, int64, int64, INTS, INTS, INTS))
def _take_runs(pushes: Cursors, table: int, width: int, ids_V: Ints, rows_V: Ints, ends_R1: Ints) -> int:
    """Takes a table's section of each push: its ids, and the addresses of their gradients. Returns how many have it."""
    count = end = 0
    for p in range(pushes.size):
        push = pushes[p]
        if push.sections == 0 or carray(pointer(push.tables), (1,), np.int64)[0] != table:
            continue
        starts = carray(pointer(push.starts), (2,), np.int64)
        rows = starts[1] - starts[0]
        ids_U = carray(pointer(push.ids + 8 * starts[0]), (rows,), np.int64)
        for i in range(rows):
            ids_V[end + i] = ids_U[i]
            rows_V[end + i] = push.values + 4 * width * i
        push.sections, push.tables, push.starts = push.sections - 1, push.tables + 8, push.starts + 8
        push.values += 4 * width * rows
        end += rows
        count += 1
        ends_R1[count] = end
    return count


@kernel(int64(INTS, INTS, INTS, INTS, INTS, int64))
def _merge_runs(ids_V: Ints, rows_V: Ints, to_ids_V: Ints, to_rows_V: Ints, ends_R1: Ints, count: int) -> int:
    """Merges each two neighbours of `count` runs; of equal ids, the first run's come first. Returns how many are left.

    It has no branch that depends on ids, and unsigned indices: it takes 4 ns for an id, not 10."""
    left = 0
    for r in range(0, count, 2):
        a, b, end = np.uint64(ends_R1[r]), np.uint64(ends_R1[r + 1]), np.uint64(ends_R1[min(r + 2, count)])
        at, end_a = a, b
        while a < end_a and b < end:
            from_a = np.uint64(ids_V[a] <= ids_V[b])
            source = b ^ ((a ^ b) & (_0 - from_a))
            to_ids_V[at], to_rows_V[at] = ids_V[source], rows_V[source]
            a += from_a
            b += _1 - from_a
            at += _1
        source = a if a < end_a else b
        for rest in range(at, end):
            to_ids_V[rest], to_rows_V[rest] = ids_V[source], rows_V[source]
            source += _1
        left += 1
        ends_R1[left] = np.int64(end)
    return left


@kernel(int64(INTS, INTS, int64, int64, int64, INTS, FLOATS, FLOATS))
def _sum_runs(
    ids_V: Ints, rows_V: Ints, end_a: int, end: int, width: int, ids_U: Ints, values: Rows, pushes_U: Rows
) -> int:
    """Merges the last two runs, and adds up the gradients of each id in their order. Returns the number of ids."""
    a, b, count = 0, end_a, 0
    for _ in range(end):
        from_a = (b == end) | ((a < end_a) & (ids_V[a] <= ids_V[b]))
        source = a if from_a else b
        a += from_a
        b += not from_a
        row = carray(pointer(rows_V[source]), (width,), np.float32)
        if count and ids_U[count - 1] == ids_V[source]:
            total = values[(count - 1) * width : count * width]
            for d in range(width):
                total[d] += row[d]
        else:
            total = values[count * width : (count + 1) * width]
            for d in range(width):
                total[d] = row[d]
            ids_U[count] = ids_V[source]  # behind the loop: before it, the kernel takes 19 ns for a row, not 7
            count += 1
        if pushes_U.size:
            pushes_U[count - 1] += np.float32(1.0)
    return count


@kernel(int64(INTS, CURSORS, INTS, INTS, INTS, FLOATS, FLOATS))
def sum_pushes(
    widths_T: Ints, pushes: Cursors, tables_S: Ints, starts_S1: Ints, ids_V: Ints, values: Rows, pushes_V: Rows
) -> int:
    """Adds up pushes in their order, `widths_T` values a row, and counts those of each id in `pushes_V`, which is zeros
    or empty. Returns the number of sections; the outputs have room for the sections and ids of all."""
    room = ids_V.size + 1  # one more, which `_sum_runs` reads and ignores
    buffers = np.empty((4, room), np.int64)
    ids, rows, to_ids, to_rows = buffers[0], buffers[1], buffers[2], buffers[3]
    ends_R1 = np.zeros(pushes.size + 1, np.int64)
    count = at = starts_S1[0] = 0
    for table in range(widths_T.size):
        runs = _take_runs(pushes, table, widths_T[table], ids, rows, ends_R1)
        if runs == 0:
            continue
        end = ends_R1[runs]
        while runs > 2:
            runs = _merge_runs(ids, rows, to_ids, to_rows, ends_R1, runs)
            ids, rows, to_ids, to_rows = to_ids, to_rows, ids, rows
        begin = starts_S1[count]
        num = _sum_runs(ids, rows, ends_R1[1], end, widths_T[table], ids_V[begin:], values[at:], pushes_V[begin:])
        tables_S[count] = table
        count += 1
        starts_S1[count] = begin + num
        at += num * widths_T[table]
    return count
