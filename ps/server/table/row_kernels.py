"""Kernels of a shard's rows: gathering, sums, digest. The index has its own (index_kernels.py).

Records and blocks are as index_kernels.py has them.
"""
# U = unique ids, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import UniTuple, int64, uint64, void

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS, INTS, ROWS, TABLE, Descriptor, RecordBlocks
from shardkeep.ps.server.table.initializers.initial_kernels import initial_values
from shardkeep.ps.server.table.layout_kernels import copy_words, prefetch_record, record, slots_of, start_of, weights_of

MARKED = np.uint32(0xFFFFFFFF)
"""The mark of a new row of fewer than 32 bits a value: as float32, fp16 or bf16 a NaN that no update gives."""

_32 = np.uint64(32)


@kernel(void(TABLE, INTS, INTS, ROWS))
def gather(table: Descriptor, ids_U: Ids, slots_U: Ints, rows_UD: Rows) -> None:
    """Weights of rows; the initial value where the slot is -1."""
    blocks, start, dim = table.blocks, table.start, rows_UD.shape[1]
    for i in range(ids_U.size):
        prefetch_record(blocks, slots_U, i)
        if slots_U[i] < 0:
            initial_values(start, ids_U[i], dim, rows_UD[i])
        else:
            weights = weights_of(record(blocks, slots_U[i]), dim)
            for d in range(dim):
                rows_UD[i, d] = weights[d]


@kernel(void(TABLE, INTS, INTS, int64))
def initialise(table: Descriptor, ids_U: Ids, slots_U: Ints, first_new: int) -> None:
    """Initial weights and slots of the records that were just added (slots from `first_new` on)."""
    blocks, start, dim = table.blocks, table.start, table.dim
    for i in range(ids_U.size):
        if slots_U[i] >= first_new:
            row = record(blocks, slots_U[i])
            initial_values(start, ids_U[i], dim, weights_of(row, dim))
            slots_of(row, dim)[:] = table.optimizer.slot_value


@kernel(void(TABLE, INTS, int64))
def mark_new(table: Descriptor, slots_U: Ints, first_new: int) -> None:
    """Marks the records that were just added (slots from `first_new` on) as new: their values follow from the id until
    they are first written."""
    for i in range(slots_U.size):
        if slots_U[i] >= first_new:
            at = start_of(table.blocks, slots_U[i]) + table.packed.mark
            carray(pointer(at), (1,), np.uint32)[0] = MARKED


@kernel(void(BLOCKS, INTS, int64, ROWS))
def write_words(blocks: RecordBlocks, slots_U: Ints, first: int, in_UK: Rows) -> None:
    """`in_UK` into words [first, first + K) of records."""
    width = in_UK.shape[1]
    for i in range(slots_U.size):
        copy_words(in_UK.ctypes.data + 4 * width * i, start_of(blocks, slots_U[i]) + 4 * first, width)


@kernel(UniTuple(uint64, 2)(TABLE))  # type: ignore[no-untyped-call]
def digest(table: Descriptor) -> tuple[np.uint64, np.uint64]:
    """Sum modulo 2**128 (low, high half) of a 128-bit mix of every record's words.

    The mix of a record: two chains over its words with different keys, closed over each other."""
    low, high = np.uint64(0), np.uint64(0)
    key = table.start.key
    for slot in range(table.count):
        row = record(table.blocks, slot).view(np.uint32)
        a, b = mix(key), mix(key ^ GOLDEN)
        for w in range(row.size):
            a = mix((a ^ np.uint64(row[w])) + GOLDEN)
            b = (b ^ np.uint64(row[w])) * np.uint64(0xD6E8FEB86659FD93)
            b = b ^ (b >> _32)
        a, b = mix(a + b), mix(b ^ (a * GOLDEN))
        low += a
        high += b + np.uint64(low < a)
    return low, high


@kernel("int64(float32[:,::1], boolean[::1])")
def finite_rows(grad_UD: Rows, finite_U: npt.NDArray[np.bool_]) -> int:
    """Marks the rows without inf or nan; returns how many there are."""
    count = 0
    for i in range(grad_UD.shape[0]):
        good = True
        for d in range(grad_UD.shape[1]):
            good = good & np.isfinite(grad_UD[i, d])
        finite_U[i] = good
        count += good
    return count
