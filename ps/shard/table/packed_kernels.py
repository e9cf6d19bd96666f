"""Kernels over tables with values of fewer than 32 bits: pull, update and load. Only such tables import them.

An update decodes some rows to a block of float32 records and calls the optimizer's own kernel on the block. A
descriptor is as in table_kernels.py, which calls `pull` and `update` by their addresses.
"""
# U = unique ids, K = rows of a block, W = words of a block's record, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.values.rounding_kernels import row_keys
from shardkeep.ps.shard.table.layout_kernels import FIRST_WEIGHT, id_of
from shardkeep.ps.shard.table.precision_kernels import read_rows, start_new, write_rows
from shardkeep.ps.shard.table.row_kernels import initial_values
from shardkeep.ps.shard.table.table_kernels import (
    ADDRESSES,
    DIM,
    FIRST,
    INITIALIZER,
    KEY,
    MARK,
    NUM_ADDRESSES,
    NUM_SLOTS,
    OPTIMIZER,
    PRECISION,
    SECOND,
    SHIFT,
    SLOT,
    STARTS,
    STARTS_AT,
    STEP,
    WIDTH,
    call_optimizer,
)

_BLOCK_WORDS, _BLOCK_ROWS = 8192, 64
"""Of the rows that are float32 at once, at most: they stay in the nearest cache."""
_BLOCK_SHIFT = 32  # a block's records are one behind the other


@kernel("void(int64[::1], int64[::1], int64[::1], float32[:,::1])")
def pull(descriptor: Ints, ids_U: Ids, slots_U: Ints, rows_UD: Rows) -> None:
    """Weights of rows as float32; the initial value where the slot is -1."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    start = carray(pointer(descriptor[STARTS_AT]), (STARTS,), np.float32)
    shift, width, precision, dim = descriptor[SHIFT], descriptor[WIDTH], descriptor[PRECISION], descriptor[DIM]
    read_rows(addresses, shift, width, slots_U, 0, slots_U.size, precision, dim, 0, rows_UD, 0)
    key, initializer = np.uint64(descriptor[KEY]), descriptor[INITIALIZER]
    for i in range(ids_U.size):
        if slots_U[i] < 0:
            initial_values(key, ids_U[i], initializer, start[FIRST], start[SECOND], dim, rows_UD[i])


@kernel("float32[:,::1](int64[::1], int64)")
def _block_of(descriptor: Ints, rows: int) -> Rows:
    """Memory for some of `rows` rows as float32 records: [2 words | D weights | S slots | padding]."""
    words = FIRST_WEIGHT + descriptor[DIM] + descriptor[NUM_SLOTS]
    words += words & 1
    return np.empty((max(1, min(rows, _BLOCK_ROWS, _BLOCK_WORDS // words)), words), np.float32)


@kernel("void(int64[::1], int64[::1], int64, int64, float32[:,::1])")
def _decode(descriptor: Ints, slots_U: Ints, begin: int, end: int, block_KW: Rows) -> None:
    """Rows as float32 records; new ones with their initial values."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    start = carray(pointer(descriptor[STARTS_AT]), (STARTS,), np.float32)
    shift, width, precision = descriptor[SHIFT], descriptor[WIDTH], descriptor[PRECISION]
    dim, num_slots, key = descriptor[DIM], descriptor[NUM_SLOTS], np.uint64(descriptor[KEY])
    read_rows(addresses, shift, width, slots_U, begin, end, precision, dim, num_slots, block_KW, FIRST_WEIGHT)
    start_new(
        addresses,
        shift,
        width,
        slots_U,
        begin,
        end,
        descriptor[MARK],
        dim,
        num_slots,
        key,
        descriptor[INITIALIZER],
        start[FIRST],
        start[SECOND],
        start[SLOT],
        block_KW,
    )


@kernel("void(int64[::1], int64[::1], int64, int64, float32[:,::1], boolean)")
def _encode(descriptor: Ints, slots_U: Ints, begin: int, end: int, block_KW: Rows, to_nearest: bool) -> None:
    """Float32 records into the table, each value rounded by random numbers of (table key, id, step, column)."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, precision = descriptor[SHIFT], descriptor[WIDTH], descriptor[PRECISION]
    ids_K, keys_K = np.empty(end - begin, np.int64), np.empty(end - begin, np.uint64)
    for i in range(begin, end):
        ids_K[i - begin] = id_of(addresses, shift, width, slots_U[i])
    row_keys(np.uint64(descriptor[KEY]), np.uint64(0), descriptor[STEP], ids_K, keys_K)
    dim, num_slots = descriptor[DIM], descriptor[NUM_SLOTS]
    write_rows(addresses, shift, width, slots_U, begin, end, precision, dim, num_slots, block_KW, keys_K, to_nearest)


@kernel("void(int64[::1], int64[::1], float32[:,::1], float32[::1], float32[::1])")
def update(descriptor: Ints, slots_U: Ints, grad_UD: Rows, squares_U: Rows, scalars: Rows) -> None:
    """One update of rows with fewer than 32 bits a value: the optimizer sees a block of float32 records."""
    block_KW = _block_of(descriptor, slots_U.size)
    most, words = block_KW.shape
    at, places_K = np.empty(1, np.int64), np.arange(most)
    at[0] = block_KW.ctypes.data
    for begin in range(0, slots_U.size, most):
        end = min(begin + most, slots_U.size)
        _decode(descriptor, slots_U, begin, end, block_KW)
        squares_K = squares_U[begin:end] if squares_U.size else squares_U
        call_optimizer(
            descriptor[OPTIMIZER],
            at,
            _BLOCK_SHIFT,
            words,
            places_K[: end - begin],
            grad_UD[begin:end],
            squares_K,
            scalars,
        )
        _encode(descriptor, slots_U, begin, end, block_KW, False)


@kernel("void(int64[::1], int64[::1], float32[:,::1], float32[:,::1])")
def set_rows(descriptor: Ints, slots_U: Ints, rows_UD: Rows, slots_US: Rows) -> None:
    """Weights, and optimizer slots where there are any, rounded to the nearest value. For values with fewer than 32
    bits."""
    dim = descriptor[DIM]
    block_KW = _block_of(descriptor, slots_U.size)
    most = block_KW.shape[0]
    for begin in range(0, slots_U.size, most):
        end = min(begin + most, slots_U.size)
        _decode(descriptor, slots_U, begin, end, block_KW)
        for i in range(begin, end):
            block_KW[i - begin, FIRST_WEIGHT : FIRST_WEIGHT + dim] = rows_UD[i]
            for s in range(slots_US.shape[1]):
                block_KW[i - begin, FIRST_WEIGHT + dim + s] = slots_US[i, s]
        _encode(descriptor, slots_U, begin, end, block_KW, True)
