"""Kernels of records: a row's record by its slot, and what is in it (layout.py).

Records are in blocks of `1 << shift` records; kernels get the blocks' addresses, so a table grows without moving a row.
The callers pass only slots that exist, and hold the table's locks.
"""
# U = unique ids, W = words of a record, D = embedding dim

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import int64, void

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS, FLOATS, INTS, RecordBlocks

FIRST_WEIGHT = 2  # words of the id in front of the weights
FP32, FP16, BF16, INT8 = 0, 1, 2, 3  # precisions of values; int8 has a float32 scale behind a row's values
AHEAD = 12  # records fetched ahead of the one in work


@kernel(int64(int64, int64))
def words_of(precision: int, count: int) -> int:
    """Words that so many values of a row take, with their scale."""
    if precision == INT8:
        return (count + 3) // 4 + 1
    return count if precision == FP32 else (count + 1) // 2


@kernel(int64(BLOCKS, int64))
def start_of(blocks: RecordBlocks, slot: int) -> int:
    """The address of a record."""
    block = carray(pointer(blocks.addresses + (slot >> blocks.shift) * 8), (1,), np.int64)[0]
    start: int = block + (slot & ((1 << blocks.shift) - 1)) * blocks.width * 4
    return start


@kernel(FLOATS(BLOCKS, int64))
def record(blocks: RecordBlocks, slot: int) -> Rows:
    """The record of `slot`, W words, as a view."""
    words: Rows = carray(pointer(start_of(blocks, slot)), (blocks.width,), np.float32)
    return words


@kernel(void(int64, int64, int64))
def copy_words(at: int, to: int, count: int) -> None:
    """Copies so many words from one address to another. Arrays of two axes would take three times as long."""
    words, copies = carray(pointer(at), (count,), np.float32), carray(pointer(to), (count,), np.float32)
    for w in range(count):
        copies[w] = words[w]


@kernel(void(BLOCKS, int64))
def fetch(blocks: RecordBlocks, slot: int) -> None:
    """Asks for all cache lines of a record. `range` with a step would divide, which costs more than the rest."""
    line = start_of(blocks, slot)
    end = line + blocks.width * 4
    line &= ~63
    while line < end:
        prefetch(line)
        line += 64


@kernel(void(BLOCKS, INTS, int64))
def prefetch_record(blocks: RecordBlocks, slots_U: Ints, i: int) -> None:
    """Fetches record `slots[i + AHEAD]` into the cache, if there is one: rows lie anywhere, and a loop over them
    would wait for memory row by row."""
    ahead = i + AHEAD
    if ahead < slots_U.size and slots_U[ahead] >= 0:
        fetch(blocks, slots_U[ahead])


@kernel(int64(BLOCKS, int64))
def id_of(blocks: RecordBlocks, slot: int) -> int:
    id_: int = carray(pointer(start_of(blocks, slot)), (1,), np.int64)[0]
    return id_


@kernel(void(BLOCKS, int64, int64))
def write_id(blocks: RecordBlocks, slot: int, id_: int) -> None:
    carray(pointer(start_of(blocks, slot)), (1,), np.int64)[0] = id_


@kernel(FLOATS(FLOATS, int64))
def weights_of(row: Rows, dim: int) -> Rows:
    """The weights of a record, a view."""
    return row[FIRST_WEIGHT : FIRST_WEIGHT + dim]


@kernel(FLOATS(FLOATS, int64))
def slots_of(row: Rows, dim: int) -> Rows:
    """The optimizer slots of a record with `dim` weights, and its counters, a view."""
    return row[FIRST_WEIGHT + dim :]
