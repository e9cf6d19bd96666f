"""Kernels over several tables at once: pull and apply, one call for all sections of a message.

A row of `descriptors`, int64, describes a table: where its index and records lie and how its rows start (the columns
below). A row of `starts`, float32, has the numbers that new rows start from. The callers keep these arrays alive, have
made room for new rows, and hold the tables' locks.
"""
# S = sections, V = ids of all sections, D = embedding dim

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.shard.table.index_kernels import find, find_or_add
from shardkeep.ps.shard.table.pre_image_kernels import ROWS as SNAPSHOT_ROWS
from shardkeep.ps.shard.table.pre_image_kernels import keep
from shardkeep.ps.shard.table.row_kernels import gather, initialise, mark_new, merge_sum

Descriptors = npt.NDArray[np.int64]
Images = npt.NDArray[np.int64]

# Columns of a descriptor.
ENTRIES, NUM_ENTRIES, OLD, NUM_OLD = 0, 1, 2, 3  # the index: address and number of entries, and of outgrown ones
ADDRESSES, NUM_ADDRESSES, SHIFT, WIDTH = 4, 5, 6, 7  # the records
COUNT, ROOM = 8, 9  # rows there are, and rows that fit before the index or the records must grow
DIM, KEY, INITIALIZER = 10, 11, 12
OPTIMIZER = 13  # address of the machine code of its optimizer's kernel
CHANGED, NUM_CHANGED = 14, 15  # address and bytes of the bits of changed rows; 0 bytes = changes are not noted
# Of tables with values of fewer than 32 bits (packed_kernels.py); all 0 in others:
PACKED_PULL, PACKED_UPDATE = 16, 17  # addresses of the machine code that reads weights and updates rows; 0 = as here
MARK, PRECISION = 18, 19  # byte of a record at which a new row is marked; precision of weights and slots
NUM_SLOTS, STARTS_AT = 20, 21  # optimizer slots of a row; address of the table's row of `starts`
STEP = 22  # of the update that follows: what random numbers of rounding depend on
COUNTERS = 23  # word of a record's counters; 0 = it has none
# Of tables with policies:
ADMITTED, REFUSED, EVICTED = 24, 25, 26  # ids that admission made rows, rows of pushes that it dropped, rows that went
REMOVED = 27  # rows that were removed since the table last gave memory back
COLUMNS = 28

# Columns of `starts`.
FIRST, SECOND, SLOT = 0, 1, 2  # parameters of the initial distribution; first value of the optimizer's slots
STARTS = 3


_INTS, _FLOATS, _ROWS = types.int64[::1], types.float32[::1], types.float32[:, ::1]


def _call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that calls the kernel whose address is the first argument. It returns nothing and raises nothing."""
    kinds = signature.args[1:]
    code = builder.inttoptr(args[0], context.call_conv.get_function_type(types.void, kinds).as_pointer())
    context.call_conv.call_function(builder, code, types.void, kinds, args[1:])
    return context.get_dummy_value()


def _call_optimizer(
    _typing: Any,
    _code: Any,
    _addresses: Any,
    _shift: Any,
    _width: Any,
    _slots_U: Any,
    _grad_UD: Any,
    _squares_U: Any,
    _scalars: Any,
) -> Any:
    """Calls an optimizer's kernel by its address: `apply` is compiled without any optimizer."""
    kinds = (_INTS, types.int64, types.int64, _INTS, _ROWS, _FLOATS, _FLOATS)
    return types.void(types.int64, *kinds), _call


def _call_pull(_typing: Any, _code: Any, _descriptor: Any, _ids_U: Any, _slots_U: Any, _rows_UD: Any) -> Any:
    """Calls the kernel that reads packed rows, which other tables do without."""
    return types.void(types.int64, _INTS, _INTS, _INTS, _ROWS), _call


def _call_update(
    _typing: Any, _code: Any, _descriptor: Any, _slots_U: Any, _grad_UD: Any, _squares_U: Any, _scalars: Any
) -> Any:
    """Calls the kernel that updates packed rows."""
    return types.void(types.int64, _INTS, _INTS, _ROWS, _FLOATS, _FLOATS), _call


call_optimizer: Any = intrinsic(_call_optimizer)
call_pull: Any = intrinsic(_call_pull)
call_update: Any = intrinsic(_call_update)


@kernel("void(int64[:,::1], float32[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], float32[::1])")
def pull(
    descriptors: Descriptors,
    starts: Rows,
    tables_S: Ints,
    starts_S1: Ints,
    ids_V: Ints,
    slots_V: Ints,
    absent_S: Ints,
    values: Rows,
) -> None:
    """Weights of all ids, table after table, into `values`; the slots of the rows, -1 for those that are not there,
    and how many these are in each section."""
    at = 0
    for s in range(tables_S.size):
        descriptor, start = descriptors[tables_S[s]], starts[tables_S[s]]
        ids_U, slots_U = ids_V[starts_S1[s] : starts_S1[s + 1]], slots_V[starts_S1[s] : starts_S1[s + 1]]
        entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
        old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
        addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
        find(entries, old, ids_U, addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U)
        end = at + ids_U.size * descriptor[DIM]
        rows_UD = values[at:end].reshape((ids_U.size, descriptor[DIM]))
        if descriptor[PACKED_PULL]:
            call_pull(descriptor[PACKED_PULL], descriptor, ids_U, slots_U, rows_UD)
        else:
            gather(
                ids_U,
                slots_U,
                addresses,
                descriptor[SHIFT],
                descriptor[WIDTH],
                np.uint64(descriptor[KEY]),
                descriptor[INITIALIZER],
                start[FIRST],
                start[SECOND],
                rows_UD,
            )
        absent_S[s] = (slots_U < 0).sum()
        at = end


@kernel("void(int64[::1], float32[::1], int64[::1], int64[::1], boolean)")
def add_rows(descriptor: Ints, start: Rows, ids_U: Ints, slots_U: Ints, found: bool) -> None:
    """Slots of ids; absent ones become rows with their initial values, or with the mark of new ones where values have
    fewer than 32 bits: what writes them next starts from the initial values."""
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, before = descriptor[SHIFT], descriptor[WIDTH], descriptor[COUNT]
    count = before
    if found:
        for i in range(ids_U.size):
            if slots_U[i] < 0:
                count = find_or_add(entries, old, ids_U[i : i + 1], addresses, shift, width, count, slots_U[i : i + 1])
    else:
        count = find_or_add(entries, old, ids_U, addresses, shift, width, count, slots_U)
    descriptor[COUNT] = count
    if count > before and descriptor[MARK]:
        mark_new(slots_U, before, addresses, shift, width, descriptor[MARK])
    elif count > before:
        key = np.uint64(descriptor[KEY])
        initializer, dim = descriptor[INITIALIZER], descriptor[DIM]
        first, second, slot = start[FIRST], start[SECOND], start[SLOT]
        initialise(ids_U, slots_U, before, addresses, shift, width, key, initializer, first, second, dim, slot)


@kernel("void(int64[::1], int64[::1])")
def note_changes(descriptor: Ints, slots_U: Ints) -> None:
    """Sets the bits of rows that change."""
    changed = carray(pointer(descriptor[CHANGED]), (descriptor[NUM_CHANGED],), np.uint8)
    for i in range(slots_U.size):
        changed[slots_U[i] >> 3] |= np.uint8(1 << (slots_U[i] & 7))


@kernel("void(int64[::1], int64[::1], float32[:,::1], float32[::1], float32[::1])")
def update(descriptor: Ints, slots_U: Ints, grad_UD: Rows, squares_U: Rows, scalars: Rows) -> None:
    """One update by the table's optimizer; `squares_U` as there. The only way in which a row changes while a server
    serves."""
    if descriptor[NUM_CHANGED]:
        note_changes(descriptor, slots_U)
    if descriptor[PACKED_UPDATE]:
        call_update(descriptor[PACKED_UPDATE], descriptor, slots_U, grad_UD, squares_U, scalars)
        return
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    call_optimizer(
        descriptor[OPTIMIZER], addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U, grad_UD, squares_U, scalars
    )


@kernel(
    "void(int64[::1], float32[::1], int64[::1], int64[::1], int64[::1], boolean, float32[:,::1], float32[::1],"
    " float32[::1])"
)
def update_section(
    descriptor: Ints,
    start: Rows,
    kept: Ints,
    ids_U: Ints,
    slots_U: Ints,
    found: bool,
    grad_UD: Rows,
    squares_U: Rows,
    scalars: Rows,
) -> None:
    """`apply` for ids of one table. `kept`: its row of `images`."""
    add_rows(descriptor, start, ids_U, slots_U, found)
    if kept[SNAPSHOT_ROWS]:
        addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
        keep(kept, addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U)
    update(descriptor, slots_U, grad_UD, squares_U, scalars)


@kernel(
    "void(int64[:,::1], float32[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], boolean,"
    " float32[::1], float32[::1], float32[:,::1])"
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
) -> None:
    """One optimizer update of all ids' rows; absent rows are added first, and those that a snapshot wants are kept as
    they were (pre_image_kernels.py; there is room for them). `values`: the gradients, table after table; `squares_V`:
    each row's mean squared gradient, empty, or NaN for all rows of a table = that of `values`.

    `found`: the slots are those of an earlier `pull`, so that only those that were absent then are looked up."""
    at = 0
    for s in range(tables_S.size):
        descriptor, start = descriptors[tables_S[s]], starts[tables_S[s]]
        ids_U, slots_U = ids_V[starts_S1[s] : starts_S1[s + 1]], slots_V[starts_S1[s] : starts_S1[s + 1]]
        end = at + ids_U.size * descriptor[DIM]
        grad_UD = values[at:end].reshape((ids_U.size, descriptor[DIM]))
        squares_U = squares_V[starts_S1[s] : starts_S1[s + 1]] if squares_V.size else squares_V
        if squares_U.size and np.isnan(squares_U[0]):  # then so are all of the table
            squares_U = squares_U[:0]
        kept = images[tables_S[s]]
        update_section(descriptor, start, kept, ids_U, slots_U, found, grad_UD, squares_U, scalars_SK[s])
        at = end


@kernel(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], float32[::1], float32[::1], int64[::1], int64[::1],"
    " int64[::1], float32[::1], float32[::1], int64[::1], int64[::1], int64[::1], float32[::1], float32[::1])"
)
def merge(
    dims_T: Ints,
    tables_A: Ints,
    starts_A1: Ints,
    ids_A: Ints,
    values_A: Rows,
    squares_A: Rows,
    tables_B: Ints,
    starts_B1: Ints,
    ids_B: Ints,
    values_B: Rows,
    squares_B: Rows,
    tables: Ints,
    starts: Ints,
    ids: Ints,
    values: Rows,
    squares: Rows,
) -> int:
    """The sum of two sets of sections, both with rising tables: `merge_sum` table by table, and of their squares where
    there are any (then both must have them). Returns the number of sections; the outputs have room for both."""
    a = b = count = at_a = at_b = to = 0
    starts[0] = 0
    while a < tables_A.size or b < tables_B.size:
        from_a = a < tables_A.size and (b == tables_B.size or tables_A[a] <= tables_B[b])
        from_b = b < tables_B.size and (a == tables_A.size or tables_B[b] <= tables_A[a])
        table = tables_A[a] if from_a else tables_B[b]
        dim = dims_T[table]
        rows_a = starts_A1[a + 1] - starts_A1[a] if from_a else 0
        rows_b = starts_B1[b + 1] - starts_B1[b] if from_b else 0
        first_a = starts_A1[a] if from_a else 0
        first_b = starts_B1[b] if from_b else 0
        begin = starts[count]
        rows = merge_sum(
            ids_A[first_a : first_a + rows_a],
            values_A[at_a : at_a + rows_a * dim].reshape((rows_a, dim)),
            ids_B[first_b : first_b + rows_b],
            values_B[at_b : at_b + rows_b * dim].reshape((rows_b, dim)),
            ids[begin : begin + rows_a + rows_b],
            values[to : to + (rows_a + rows_b) * dim].reshape((rows_a + rows_b, dim)),
        )
        if squares.size:
            merge_sum(
                ids_A[first_a : first_a + rows_a],
                squares_A[first_a : first_a + rows_a].reshape((rows_a, 1)),
                ids_B[first_b : first_b + rows_b],
                squares_B[first_b : first_b + rows_b].reshape((rows_b, 1)),
                ids[begin : begin + rows_a + rows_b],
                squares[begin : begin + rows_a + rows_b].reshape((rows_a + rows_b, 1)),
            )
        tables[count] = table
        starts[count + 1] = begin + rows
        at_a += rows_a * dim
        at_b += rows_b * dim
        to += rows * dim
        a += from_a
        b += from_b
        count += 1
    return count
