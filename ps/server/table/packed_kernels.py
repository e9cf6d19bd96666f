"""Kernels over tables with values of fewer than 32 bits: pull, update and load. Only such tables import them.

An update decodes some rows to a block of float32 records and calls the optimizer's own kernel on the block.
table_kernels.py calls `pull` and `update` by their addresses.
"""
# U = unique ids, K = rows of a block, W = words of a block's record, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
from numba.core.types import boolean, int64, void

from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.values.rounding_kernels import row_keys
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS_DTYPE, FLOATS, INTS, ROWS, TABLE, Descriptor
from shardkeep.ps.server.table.initializers.initial_kernels import initial_values
from shardkeep.ps.server.table.layout_kernels import FIRST_WEIGHT, id_of
from shardkeep.ps.server.table.precision_kernels import read_rows, start_new, write_rows
from shardkeep.ps.server.table.table_kernels import call_optimizer

_BLOCK_WORDS, _BLOCK_ROWS = 8192, 64
"""Of the rows that are float32 at once, at most: they stay in the nearest cache."""
_BLOCK_SHIFT = 32  # a block's records are one behind the other


@kernel(void(TABLE, INTS, INTS, ROWS))
def pull(table: Descriptor, ids_U: Ids, slots_U: Ints, rows_UD: Rows) -> None:
    """Weights of rows as float32; the initial value where the slot is -1."""
    read_rows(table, slots_U, 0, slots_U.size, 0, rows_UD, 0)
    for i in range(ids_U.size):
        if slots_U[i] < 0:
            initial_values(table.start, ids_U[i], table.dim, rows_UD[i])


@kernel(ROWS(TABLE, int64))
def _block_of(table: Descriptor, rows: int) -> Rows:
    """Memory for some of `rows` rows as float32 records: [2 words | D weights | S slots | padding]."""
    words = FIRST_WEIGHT + table.dim + table.packed.num_slots
    words += words & 1
    return np.empty((max(1, min(rows, _BLOCK_ROWS, _BLOCK_WORDS // words)), words), np.float32)


@kernel(void(TABLE, INTS, int64, int64, ROWS))
def _decode(table: Descriptor, slots_U: Ints, begin: int, end: int, block_KW: Rows) -> None:
    """Rows as float32 records; new ones with their initial values."""
    read_rows(table, slots_U, begin, end, table.packed.num_slots, block_KW, FIRST_WEIGHT)
    start_new(table, slots_U, begin, end, block_KW)


@kernel(void(TABLE, INTS, int64, int64, ROWS, boolean))
def _encode(table: Descriptor, slots_U: Ints, begin: int, end: int, block_KW: Rows, to_nearest: bool) -> None:
    """Float32 records into the table, each value rounded by random numbers of (table key, id, step, column)."""
    ids_K, keys_K = np.empty(end - begin, np.int64), np.empty(end - begin, np.uint64)
    for i in range(begin, end):
        ids_K[i - begin] = id_of(table.blocks, slots_U[i])
    row_keys(table.start.key, np.uint64(0), table.step, ids_K, keys_K)
    write_rows(table, slots_U, begin, end, block_KW, keys_K, to_nearest)


@kernel(void(TABLE, INTS, ROWS, FLOATS))
def update(table: Descriptor, slots_U: Ints, grad_UD: Rows, scalars: Rows) -> None:
    """One update of rows with fewer than 32 bits a value: the optimizer sees a block of float32 records."""
    block_KW = _block_of(table, slots_U.size)
    most, words = block_KW.shape
    address, places_K, blocks = np.empty(1, np.int64), np.arange(most), np.empty(1, BLOCKS_DTYPE)
    block = blocks[0]
    block.addresses, block.shift, block.width = address.ctypes.data, _BLOCK_SHIFT, words
    for begin in range(0, slots_U.size, most):
        address[0] = block_KW.ctypes.data  # in the loop: an array lives until its last use
        end = min(begin + most, slots_U.size)
        _decode(table, slots_U, begin, end, block_KW)
        call_optimizer(table.optimizer.code, blocks[0], table.dim, places_K[: end - begin], grad_UD[begin:end], scalars)
        _encode(table, slots_U, begin, end, block_KW, False)


@kernel(void(TABLE, INTS, ROWS, ROWS))
def set_rows(table: Descriptor, slots_U: Ints, rows_UD: Rows, slots_US: Rows) -> None:
    """Weights, and optimizer slots where there are any, rounded to the nearest value. For values with fewer than 32
    bits."""
    dim = table.dim
    block_KW = _block_of(table, slots_U.size)
    most = block_KW.shape[0]
    for begin in range(0, slots_U.size, most):
        end = min(begin + most, slots_U.size)
        _decode(table, slots_U, begin, end, block_KW)
        for i in range(begin, end):
            block_KW[i - begin, FIRST_WEIGHT : FIRST_WEIGHT + dim] = rows_UD[i]
            for s in range(slots_US.shape[1]):
                block_KW[i - begin, FIRST_WEIGHT + dim + s] = slots_US[i, s]
        _encode(table, slots_U, begin, end, block_KW, True)
