"""Kernels of a shard: mixing, the hash index, rows in blocks, initial values, sums, digest.

A row's record is float32: [id as 2 words | D weights | S slots | 0 or 1 word of padding]. Records lie in
blocks of `1 << shift` records; kernels get the blocks' addresses, so a table grows without moving a row.
The callers keep the blocks alive and pass only slots that exist.
"""
# U = unique ids, D = embedding dim, S = optimizer slots of a row, W = words of a record

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

from shardkeep.base.kernels import kernel

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Entries = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.int64]

AHEAD = 12  # records fetched ahead of the one in work
FIRST_WEIGHT = 2  # words of the id in front of the weights

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW32 = np.uint64(0xFFFFFFFF)
_HIGH32 = np.uint64(0xFFFFFFFF00000000)
_32 = np.uint64(32)
_UNIT24 = np.float32(2.0**-23)
_UNIT32 = 2.0**-32


def _void_pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a void pointer, for carray()."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_void_pointer)


def _prefetch_line(_typing: Any, _address: Any) -> Any:
    """Asks the CPU to fetch the cache line at an address; never faults."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])  # for reading, keep, data
        return _context.get_dummy_value()

    return types.void(types.int64), codegen


_prefetch: Any = intrinsic(_prefetch_line)


@kernel("uint64(uint64)")
def mix(x: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel("float32[::1](int64[::1], int64, int64, int64)")
def record(addresses: Addresses, shift: int, width: int, slot: int) -> Rows:
    """The record of `slot`, W words, as a view."""
    start = addresses[slot >> shift] + (slot & ((1 << shift) - 1)) * width * 4
    words: Rows = carray(_pointer(start), (width,), np.float32)
    return words


@kernel("void(int64[::1], int64, int64, int64[::1], int64)")
def prefetch_record(addresses: Addresses, shift: int, width: int, slots_U: Slots, i: int) -> None:
    """Fetches record `slots[i + AHEAD]` into the cache, if there is one: rows lie anywhere, and a loop over them
    would wait for memory row by row."""
    ahead = i + AHEAD
    if ahead < slots_U.size and slots_U[ahead] >= 0:
        start = addresses[slots_U[ahead] >> shift] + (slots_U[ahead] & ((1 << shift) - 1)) * width * 4
        for line in range(0, width * 4 + 60, 64):
            _prefetch(start + line)


@kernel("int64(int64[::1], int64, int64, int64)")
def id_of(addresses: Addresses, shift: int, width: int, slot: int) -> int:
    start = addresses[slot >> shift] + (slot & ((1 << shift) - 1)) * width * 4
    id_: int = carray(_pointer(start), (1,), np.int64)[0]
    return id_


# The index is open addressing with linear probing over a power of two of entries; an entry is
# (high half of the hash | slot + 1), 0 = empty. The id itself is compared in the record.


@kernel("int64(uint64[::1], int64, uint64, int64[::1], int64, int64)")
def probe(entries: Entries, id_: int, hash_: np.uint64, addresses: Addresses, shift: int, width: int) -> int:
    """The slot of an id, or -1 - (position of the empty entry that ends its chain)."""
    slot: int
    mask = np.uint64(entries.size - 1)
    at = hash_ & mask
    while True:
        entry = entries[at]
        if entry == np.uint64(0):
            slot = -1 - np.int64(at)  # type: ignore[assignment]
            return slot
        if (entry ^ hash_) & _HIGH32 == np.uint64(0):
            slot = np.int64(entry & _LOW32) - 1  # type: ignore[assignment]
            if id_of(addresses, shift, width, slot) == id_:
                return slot
        at = (at + np.uint64(1)) & mask


@kernel("void(uint64[::1], int64[::1], int64[::1])")
def first_guess(entries: Entries, ids_U: Ids, guess_U: Slots) -> None:
    """The slot that the first entry of each id's chain names, -1 where its hash differs or it is empty.

    No load waits for another, so the cache misses of many ids overlap; `probe` alone waits for two each."""
    mask = np.uint64(entries.size - 1)
    for i in range(ids_U.size):
        hash_ = mix(np.uint64(ids_U[i]) + _GOLDEN)
        entry = entries[hash_ & mask]
        same = (entry ^ hash_) & _HIGH32 == np.uint64(0) and entry & _LOW32 != np.uint64(0)
        guess_U[i] = np.int64(entry & _LOW32) - 1 if same else -1


@kernel("void(uint64[::1], uint64[::1], int64[::1], int64[::1], int64, int64, int64[::1])")
def find(
    entries: Entries, old: Entries, ids_U: Ids, addresses: Addresses, shift: int, width: int, slots_U: Slots
) -> None:
    """Slots of ids, -1 where absent. `old` holds entries not yet moved (size 1 = none)."""
    first_guess(entries, ids_U, slots_U)
    for i in range(ids_U.size):
        slot = slots_U[i]
        if slot >= 0 and id_of(addresses, shift, width, slot) == ids_U[i]:
            continue
        hash_ = mix(np.uint64(ids_U[i]) + _GOLDEN)
        slot = probe(entries, ids_U[i], hash_, addresses, shift, width)
        if slot < 0 and old.size > 1:
            slot = probe(old, ids_U[i], hash_, addresses, shift, width)
        slots_U[i] = max(slot, -1)


@kernel("int64(uint64[::1], uint64[::1], int64[::1], int64[::1], int64, int64, int64, int64[::1])")
def find_or_add(
    entries: Entries,
    old: Entries,
    ids_U: Ids,
    addresses: Addresses,
    shift: int,
    width: int,
    count: int,
    slots_U: Slots,
) -> int:
    """Slots of ids; absent ones get slots from `count` on and their ids are written. Returns the new count.

    The caller has made room: entries and records for all ids."""
    first_guess(entries, ids_U, slots_U)
    for i in range(ids_U.size):
        slot = slots_U[i]
        if slot >= 0 and id_of(addresses, shift, width, slot) == ids_U[i]:
            continue
        hash_ = mix(np.uint64(ids_U[i]) + _GOLDEN)
        slot = probe(entries, ids_U[i], hash_, addresses, shift, width)
        if slot < 0:
            position = -1 - slot
            slot = -1
            if old.size > 1:
                slot = probe(old, ids_U[i], hash_, addresses, shift, width)
            if slot < 0:
                slot = count
                count += 1
                start = addresses[slot >> shift] + (slot & ((1 << shift) - 1)) * width * 4
                carray(_pointer(start), (1,), np.int64)[0] = ids_U[i]
            entries[position] = (hash_ & _HIGH32) | np.uint64(slot + 1)
        slots_U[i] = slot
    return count


@kernel("void(uint64[::1], uint64[::1], int64, int64, int64[::1], int64, int64)")
def move_entries(
    entries: Entries, old: Entries, begin: int, end: int, addresses: Addresses, shift: int, width: int
) -> None:
    """Copies entries [begin, end) of an outgrown index into the new one; those already there stay."""
    for i in range(begin, end):
        if old[i] != np.uint64(0):
            slot: Any = np.int64(old[i] & _LOW32) - 1
            id_ = id_of(addresses, shift, width, slot)
            hash_ = mix(np.uint64(id_) + _GOLDEN)
            found = probe(entries, id_, hash_, addresses, shift, width)
            if found < 0:
                entries[-1 - found] = old[i]


@kernel("void(uint64, int64, int64, float32, int64, float32[::1])")
def initial_values(key: np.uint64, id_: int, law: int, scale: np.float32, dim: int, out: Rows) -> None:
    """Initial weights of a row into out[:dim]: one 64-bit hash of (table key, id, pair) per two columns.

    Law 0: zeros. 1: uniform in [-scale, scale), 24 bits. 2: normal by Box-Muller (Box, Muller 1958)."""
    if law == 0:
        for d in range(dim):
            out[d] = np.float32(0.0)
        return
    base = mix(key ^ mix(np.uint64(id_) + _GOLDEN))
    for pair in range((dim + 1) // 2):
        bits = mix(base + np.uint64(pair + 1) * _GOLDEN)
        if law == 1:
            first = (np.float32(np.int32(bits >> np.uint64(40))) * _UNIT24 - np.float32(1.0)) * scale
            second = np.float32(np.int32((bits >> np.uint64(8)) & np.uint64(0xFFFFFF)))
            second = (second * _UNIT24 - np.float32(1.0)) * scale
        else:
            radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _32) + 1.0) * _UNIT32)) * np.float64(scale)
            angle = 2.0 * np.pi * (np.float64(bits & _LOW32) * _UNIT32)
            first = np.float32(radius * np.cos(angle))
            second = np.float32(radius * np.sin(angle))
        out[2 * pair] = first
        if 2 * pair + 1 < dim:
            out[2 * pair + 1] = second


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int64, uint64, int64, float32, float32[:,::1])")
def gather(
    ids_U: Ids,
    slots_U: Slots,
    addresses: Addresses,
    shift: int,
    width: int,
    key: np.uint64,
    law: int,
    scale: np.float32,
    rows_UD: Rows,
) -> None:
    """Weights of rows; the initial value where the slot is -1."""
    dim = rows_UD.shape[1]
    for i in range(ids_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        if slots_U[i] < 0:
            initial_values(key, ids_U[i], law, scale, dim, rows_UD[i])
        else:
            row = record(addresses, shift, width, slots_U[i])
            for d in range(dim):
                rows_UD[i, d] = row[FIRST_WEIGHT + d]


@kernel("void(int64[::1], int64[::1], int64, int64[::1], int64, int64, uint64, int64, float32, int64, float32)")
def initialise(
    ids_U: Ids,
    slots_U: Slots,
    first_new: int,
    addresses: Addresses,
    shift: int,
    width: int,
    key: np.uint64,
    law: int,
    scale: np.float32,
    dim: int,
    slot_value: np.float32,
) -> None:
    """Initial weights and slots of the records that were just added (slots from `first_new` on)."""
    for i in range(ids_U.size):
        if slots_U[i] >= first_new:
            row = record(addresses, shift, width, slots_U[i])
            initial_values(key, ids_U[i], law, scale, dim, row[FIRST_WEIGHT:])
            for w in range(FIRST_WEIGHT + dim, width):
                row[w] = slot_value


@kernel("void(int64[::1], int64, int64, int64[::1], int64, float32[:,::1])")
def read_words(addresses: Addresses, shift: int, width: int, slots_U: Slots, first: int, out_UK: Rows) -> None:
    """Words [first, first + K) of records into out."""
    for i in range(slots_U.size):
        row = record(addresses, shift, width, slots_U[i])
        for k in range(out_UK.shape[1]):
            out_UK[i, k] = row[first + k]


@kernel("void(int64[::1], int64, int64, int64[::1], int64, float32[:,::1])")
def write_words(addresses: Addresses, shift: int, width: int, slots_U: Slots, first: int, in_UK: Rows) -> None:
    """`in_UK` into words [first, first + K) of records."""
    for i in range(slots_U.size):
        row = record(addresses, shift, width, slots_U[i])
        for k in range(in_UK.shape[1]):
            row[first + k] = in_UK[i, k]


@kernel("void(int64[::1], int64, int64, int64[::1])")
def read_ids(addresses: Addresses, shift: int, width: int, ids_N: Ids) -> None:
    for slot in range(ids_N.size):
        ids_N[slot] = id_of(addresses, shift, width, slot)


@kernel("UniTuple(uint64, 2)(int64[::1], int64, int64, int64, int64, uint64)")
def digest(
    addresses: Addresses, shift: int, width: int, count: int, used: int, key: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Sum modulo 2**128 (low, high half) of a 128-bit mix of every record's first `used` words.

    The mix of a record: two chains over its words with different keys, closed over each other."""
    low, high = np.uint64(0), np.uint64(0)
    for slot in range(count):
        row = record(addresses, shift, width, slot).view(np.uint32)
        a, b = mix(key), mix(key ^ _GOLDEN)
        for w in range(used):
            a = mix((a ^ np.uint64(row[w])) + _GOLDEN)
            b = (b ^ np.uint64(row[w])) * np.uint64(0xD6E8FEB86659FD93)
            b = b ^ (b >> _32)
        a, b = mix(a + b), mix(b ^ (a * _GOLDEN))
        low += a
        high += b + np.uint64(low < a)
    return low, high


@kernel("int64(int64[::1], float32[:,::1], int64[::1], float32[:,::1], int64[::1], float32[:,::1])")
def merge_sum(ids_A: Ids, grad_AD: Rows, ids_B: Ids, grad_BD: Rows, ids_U: Ids, grad_UD: Rows) -> int:
    """Merges two sorted lists of unique ids, adding first + second where both have an id. Returns the length."""
    a = b = count = 0
    while a < ids_A.size or b < ids_B.size:
        from_a = a < ids_A.size and (b == ids_B.size or ids_A[a] <= ids_B[b])
        from_b = b < ids_B.size and (a == ids_A.size or ids_B[b] <= ids_A[a])
        ids_U[count] = ids_A[a] if from_a else ids_B[b]
        for d in range(grad_UD.shape[1]):
            if from_a and from_b:
                grad_UD[count, d] = grad_AD[a, d] + grad_BD[b, d]
            elif from_a:
                grad_UD[count, d] = grad_AD[a, d]
            else:
                grad_UD[count, d] = grad_BD[b, d]
        a += from_a
        b += from_b
        count += 1
    return count


@kernel("int64(int64[::1])")
def first_disorder(ids_U: Ids) -> int:
    """The first position whose id is not above the one before it; -1 when sorted and unique."""
    for i in range(1, ids_U.size):
        if ids_U[i] <= ids_U[i - 1]:
            return i
    return -1


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
