"""Kernels of a snapshot: rows kept before they change, rows sorted by placement bucket, rows taken apart for a file.

Pre-images are records like the table's, in blocks of the same size.
"""
# U = unique ids, K = rows of a part, D = embedding dim, S = optimizer slots of a row, B = buckets, N = rows

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import int64, uint8, uint32, void

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Bytes, Ints, Rows, UInt32s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.placement_kernels import bucket
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS, INTS, ROWS, TABLE, Descriptor, RecordBlocks
from shardkeep.ps.server.table.layout_kernels import (
    AHEAD,
    FIRST_WEIGHT,
    copy_words,
    fetch,
    id_of,
    prefetch_record,
    record,
    start_of,
)

_BITS, _ORDER = uint8[::1], uint32[::1]


@kernel(void(TABLE, INTS))
def keep(table: Descriptor, slots_U: Ints) -> None:
    """Copies rows that are still as they were at the snapshot to the pre-images: call it before they change. There is
    room for them."""
    blocks, images = table.blocks, table.images
    kept, rows, count = images.blocks, images.rows, images.count
    bits = carray(pointer(images.bits), ((rows + 7) // 8,), np.uint8)
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        slot = slots_U[i]
        if slot < rows and not bits[slot >> 3] & np.uint8(1 << (slot & 7)):
            bits[slot >> 3] |= np.uint8(1 << (slot & 7))
            row, to = record(blocks, slot), record(kept, count)
            for w in range(row.size):
                to[w] = row[w]
            count += 1
    images.count = count


@kernel(void(BLOCKS, int64, INTS))
def count_buckets(blocks: RecordBlocks, count: int, counts_B: Ints) -> None:
    """Adds the number of the first `count` records that each bucket has."""
    for slot in range(count):
        counts_B[bucket(id_of(blocks, slot))] += 1


@kernel(void(BLOCKS, INTS, _ORDER))
def sort_slots(blocks: RecordBlocks, next_B: Ints, order_N: UInt32s) -> None:
    """Counting sort of the first slots: each goes to its bucket's next place in `order`."""
    for slot in range(order_N.size):
        b = bucket(id_of(blocks, slot))
        order_N[next_B[b]] = slot
        next_B[b] += 1


@kernel(int64(BLOCKS, _ORDER, int64))
def slot_at(blocks: RecordBlocks, order_U: UInt32s, i: int) -> int:
    """The slot at a place of `order`; one further on is fetched into the cache."""
    if i + AHEAD < order_U.size:
        fetch(blocks, np.int64(order_U[i + AHEAD]))  # type: ignore[arg-type]
    slot: int = np.int64(order_U[i])  # type: ignore[assignment]
    return slot


@kernel(void(int64, INTS, ROWS, ROWS, int64))
def take_apart(at: int, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int) -> None:
    """The id, weights and optimizer slots of the record at an address to place `k`."""
    weights, slots = rows_KD.shape[1], slots_KS.shape[1]
    ids_K[k] = carray(pointer(at), (1,), np.int64)[0]
    copy_words(at + 4 * FIRST_WEIGHT, rows_KD.ctypes.data + 4 * weights * k, weights)
    copy_words(at + 4 * (FIRST_WEIGHT + weights), slots_KS.ctypes.data + 4 * slots * k, slots)


@kernel(int64(BLOCKS, _BITS, int64, INTS, INTS, ROWS, ROWS, int64))
def copy_rows(
    blocks: RecordBlocks, bits: Bytes, rows: int, slots_U: Ints, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int
) -> int:
    """Takes apart those of the first `rows` records that are neither kept nor taken, from place `k` on, and puts their
    slots in front. Returns their number. Pushes may change the rows meanwhile: `claim` says which copies count."""
    count = 0
    for i in range(slots_U.size):
        slot = slots_U[i]
        if slot < rows and not bits[slot >> 3] & np.uint8(1 << (slot & 7)):
            slots_U[count] = slot
            count += 1
    for i in range(count):
        if i + AHEAD < count:
            fetch(blocks, slots_U[i + AHEAD])
        take_apart(start_of(blocks, slots_U[i]), ids_K, rows_KD, slots_KS, k + i)
    return count


@kernel(int64(_BITS, INTS, INTS, ROWS, ROWS, int64))
def claim(bits: Bytes, slots_U: Ints, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int) -> int:
    """Marks the rows whose copies begin at place `k` as taken; drops the copies of those that are kept by now. Returns
    the place after the others. No push may change rows during the call: rows that are not kept have not changed."""
    begin = k
    for i in range(slots_U.size):
        slot, at = slots_U[i], begin + i
        if not bits[slot >> 3] & np.uint8(1 << (slot & 7)):
            bits[slot >> 3] |= np.uint8(1 << (slot & 7))
            if at > k:
                ids_K[k], rows_KD[k], slots_KS[k] = ids_K[at], rows_KD[at], slots_KS[at]
            k += 1
    return k


@kernel(int64(BLOCKS, int64, int64, int64))
def count_kept(kept: RecordBlocks, count: int, first: int, end: int) -> int:
    """Those of `count` kept rows that are of buckets [first, end)."""
    num_kept = 0
    for i in range(count):
        num_kept += first <= bucket(id_of(kept, i)) < end
    return num_kept


@kernel(int64(BLOCKS, int64, int64, int64, INTS, ROWS, ROWS, int64))
def take_kept(
    kept: RecordBlocks, count: int, first: int, end: int, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int
) -> int:
    """Takes apart those of `count` kept rows that are of buckets [first, end); returns the place after them."""
    for i in range(count):
        if first <= bucket(id_of(kept, i)) < end:
            take_apart(start_of(kept, i), ids_K, rows_KD, slots_KS, k)
            k += 1
    return k


@kernel(void(ROWS, INTS, ROWS, ROWS, int64))
def take_all(records_UW: Rows, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int) -> None:
    """Takes apart records that lie one behind the other."""
    for i in range(records_UW.shape[0]):
        take_apart(records_UW[i].ctypes.data, ids_K, rows_KD, slots_KS, k + i)


@kernel(void(BLOCKS, _ORDER, ROWS))
def copy_records(blocks: RecordBlocks, order_U: UInt32s, records_UW: Rows) -> None:
    """Whole records, one behind the other."""
    for i in range(order_U.size):
        row = record(blocks, slot_at(blocks, order_U, i))
        for w in range(row.size):
            records_UW[i, w] = row[w]
