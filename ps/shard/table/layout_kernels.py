"""Kernels of records: a row's record by its slot, and the id, weights and optimizer slots in it (layout.py).

Records are in blocks of `1 << shift` records; kernels get the blocks' addresses, so a table grows without moving a row.
The callers keep the blocks alive and pass only slots that exist.
"""
# U = unique ids, W = words of a record, D = embedding dim

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel

FIRST_WEIGHT = 2  # words of the id in front of the weights
FP32, FP16, BF16, INT8 = 0, 1, 2, 3  # precisions of values; int8 has a float32 scale behind a row's values
AHEAD = 12  # records fetched ahead of the one in work


@kernel("int64(int64, int64)")
def words_of(precision: int, count: int) -> int:
    """Words that so many values of a row take, with their scale."""
    if precision == INT8:
        return (count + 3) // 4 + 1
    return count if precision == FP32 else (count + 1) // 2


@kernel("int64(int64[::1], int64, int64, int64)")
def start_of(addresses: Ints, shift: int, width: int, slot: int) -> int:
    """The address of a record."""
    start: int = addresses[slot >> shift] + (slot & ((1 << shift) - 1)) * width * 4
    return start


@kernel("float32[::1](int64[::1], int64, int64, int64)")
def record(addresses: Ints, shift: int, width: int, slot: int) -> Rows:
    """The record of `slot`, W words, as a view."""
    words: Rows = carray(pointer(start_of(addresses, shift, width, slot)), (width,), np.float32)
    return words


@kernel("void(int64[::1], int64, int64, int64)")
def fetch(addresses: Ints, shift: int, width: int, slot: int) -> None:
    """Asks for all cache lines of a record. `range` with a step would divide, which costs more than the rest."""
    line = start_of(addresses, shift, width, slot)
    end = line + width * 4
    line &= ~63
    while line < end:
        prefetch(line)
        line += 64


@kernel("void(int64[::1], int64, int64, int64[::1], int64)")
def prefetch_record(addresses: Ints, shift: int, width: int, slots_U: Ints, i: int) -> None:
    """Fetches record `slots[i + AHEAD]` into the cache, if there is one: rows lie anywhere, and a loop over them
    would wait for memory row by row."""
    ahead = i + AHEAD
    if ahead < slots_U.size and slots_U[ahead] >= 0:
        fetch(addresses, shift, width, slots_U[ahead])


@kernel("int64(int64[::1], int64, int64, int64)")
def id_of(addresses: Ints, shift: int, width: int, slot: int) -> int:
    id_: int = carray(pointer(start_of(addresses, shift, width, slot)), (1,), np.int64)[0]
    return id_


@kernel("void(int64[::1], int64, int64, int64, int64)")
def write_id(addresses: Ints, shift: int, width: int, slot: int, id_: int) -> None:
    carray(pointer(start_of(addresses, shift, width, slot)), (1,), np.int64)[0] = id_


@kernel("float32[::1](float32[::1], int64)")
def weights_of(row: Rows, dim: int) -> Rows:
    """The weights of a record, a view."""
    return row[FIRST_WEIGHT : FIRST_WEIGHT + dim]


@kernel("float32[::1](float32[::1], int64)")
def slots_of(row: Rows, dim: int) -> Rows:
    """The optimizer slots of a record with `dim` weights, a view; its padding too."""
    return row[FIRST_WEIGHT + dim :]
