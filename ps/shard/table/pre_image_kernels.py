"""Kernels of a snapshot: rows kept before they change, rows sorted by placement bucket, rows taken apart for a file.

What pushes must keep of a table is a row of int64, the columns below. Pre-images are records like the table's, in
blocks of the same size.
"""
# U = unique ids, K = rows of a part, D = embedding dim, S = optimizer slots of a row, B = buckets, N = rows

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Bytes, Ints, Rows, UInt32s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.placement_kernels import bucket
from shardkeep.ps.shard.table.layout_kernels import AHEAD, fetch, id_of, prefetch_record, record, slots_of, weights_of

ROWS = 0  # rows there were when the snapshot was made; 0 = nothing to keep
BITS, NUM_BITS = 1, 2  # address and bytes of the bits of the rows that are kept or taken
ADDRESSES, NUM_ADDRESSES = 3, 4  # blocks of kept rows
COUNT = 5  # kept rows
COLUMNS = 6
NO_IMAGES: Ints = np.zeros(COLUMNS, dtype=np.int64)
"""For a table whose rows no snapshot keeps."""


@kernel("void(int64[::1], int64[::1], int64, int64, int64[::1])")
def keep(images: Ints, addresses: Ints, shift: int, width: int, slots_U: Ints) -> None:
    """Copies rows that are still as they were at the snapshot to the pre-images: call it before they change."""
    bits = carray(pointer(images[BITS]), (images[NUM_BITS],), np.uint8)
    kept = carray(pointer(images[ADDRESSES]), (images[NUM_ADDRESSES],), np.int64)
    rows, count = images[ROWS], images[COUNT]
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        slot = slots_U[i]
        if slot < rows and not bits[slot >> 3] & np.uint8(1 << (slot & 7)):
            bits[slot >> 3] |= np.uint8(1 << (slot & 7))
            row, to = record(addresses, shift, width, slot), record(kept, shift, width, count)
            for w in range(width):
                to[w] = row[w]
            count += 1
    images[COUNT] = count


@kernel("void(int64[::1], int64, int64, uint8[::1], int64, int64, int64[::1])")
def count_buckets(addresses: Ints, shift: int, width: int, chosen: Bytes, begin: int, end: int, counts_B: Ints) -> None:
    """Adds the number of rows in slots [begin, end) that each bucket has. `chosen`: bits of those that count; empty =
    all."""
    for slot in range(begin, end):
        if not chosen.size or chosen[slot >> 3] & np.uint8(1 << (slot & 7)):
            counts_B[bucket(id_of(addresses, shift, width, slot))] += 1


@kernel("void(int64[::1], int64, int64, uint8[::1], int64, int64, int64[::1], uint32[::1])")
def sort_slots(
    addresses: Ints, shift: int, width: int, chosen: Bytes, begin: int, end: int, next_B: Ints, order_N: UInt32s
) -> None:
    """Counting sort of the chosen slots of [begin, end): each goes to its bucket's next place in `order`."""
    for slot in range(begin, end):
        if not chosen.size or chosen[slot >> 3] & np.uint8(1 << (slot & 7)):
            b = bucket(id_of(addresses, shift, width, slot))
            order_N[next_B[b]] = slot
            next_B[b] += 1


@kernel("int64(int64[::1], int64, int64, uint32[::1], int64)")
def slot_at(addresses: Ints, shift: int, width: int, order_U: UInt32s, i: int) -> int:
    """The slot at a place of `order`; one further on is fetched into the cache."""
    if i + AHEAD < order_U.size:
        fetch(addresses, shift, width, np.int64(order_U[i + AHEAD]))  # type: ignore[arg-type]
    slot: int = np.int64(order_U[i])  # type: ignore[assignment]
    return slot


@kernel("void(float32[::1], int64[::1], float32[:,::1], float32[:,::1], int64)")
def take_apart(row: Rows, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int) -> None:
    """A record's id, weights and optimizer slots to place `k`."""
    ids_K[k] = row.view(np.int64)[0]
    dim = rows_KD.shape[1]
    weights, slots = weights_of(row, dim), slots_of(row, dim)
    for d in range(dim):
        rows_KD[k, d] = weights[d]
    for s in range(slots_KS.shape[1]):
        slots_KS[k, s] = slots[s]


@kernel(
    "int64(int64[::1], int64, int64, uint8[::1], int64, int64[::1], int64[::1], float32[:,::1], float32[:,::1], int64)"
)
def take(
    addresses: Ints,
    shift: int,
    width: int,
    bits: Bytes,
    rows: int,
    slots_U: Ints,
    ids_K: Ints,
    rows_KD: Rows,
    slots_KS: Rows,
    k: int,
) -> int:
    """Takes apart those of the first `rows` records that are neither kept nor taken, from place `k` on; returns the
    place after them. They may change from now on."""
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        slot = slots_U[i]
        if slot < rows and not bits[slot >> 3] & np.uint8(1 << (slot & 7)):
            bits[slot >> 3] |= np.uint8(1 << (slot & 7))
            take_apart(record(addresses, shift, width, slot), ids_K, rows_KD, slots_KS, k)
            k += 1
    return k


@kernel("int64(int64[::1], int64, int64, int64, int64, int64)")
def count_kept(kept: Ints, shift: int, width: int, count: int, first: int, end: int) -> int:
    """Those of `count` kept rows that are of buckets [first, end)."""
    found = 0
    for i in range(count):
        found += first <= bucket(id_of(kept, shift, width, i)) < end
    return found


@kernel("int64(int64[::1], int64, int64, int64, int64, int64, int64[::1], float32[:,::1], float32[:,::1], int64)")
def take_kept(
    kept: Ints,
    shift: int,
    width: int,
    count: int,
    first: int,
    end: int,
    ids_K: Ints,
    rows_KD: Rows,
    slots_KS: Rows,
    k: int,
) -> int:
    """Takes apart those of `count` kept rows that are of buckets [first, end); returns the place after them."""
    for i in range(count):
        if first <= bucket(id_of(kept, shift, width, i)) < end:
            take_apart(record(kept, shift, width, i), ids_K, rows_KD, slots_KS, k)
            k += 1
    return k


@kernel("void(float32[:,::1], int64[::1], float32[:,::1], float32[:,::1], int64)")
def take_all(records_UW: Rows, ids_K: Ints, rows_KD: Rows, slots_KS: Rows, k: int) -> None:
    """Takes apart records that lie one behind the other."""
    for i in range(records_UW.shape[0]):
        take_apart(records_UW[i], ids_K, rows_KD, slots_KS, k + i)


@kernel("void(int64[::1], int64, int64, uint32[::1], float32[:,::1])")
def copy_records(addresses: Ints, shift: int, width: int, order_U: UInt32s, records_UW: Rows) -> None:
    """Whole records, one behind the other."""
    for i in range(order_U.size):
        row = record(addresses, shift, width, slot_at(addresses, shift, width, order_U, i))
        for w in range(width):
            records_UW[i, w] = row[w]
