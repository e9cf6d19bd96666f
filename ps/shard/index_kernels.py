"""Kernels of the index: mixing of bits, records by slot, the hash table from ids to slots.

A row's record is float32: [id as 2 words | D weights | S slots | 0 or 1 word of padding]. Records lie in
blocks of `1 << shift` records; kernels get the blocks' addresses, so a table grows without moving a row.
The callers keep the blocks alive and pass only slots that exist.
"""
# U = unique ids, W = words of a record

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


@kernel("void(int64[::1], int64, int64, int64[::1])")
def read_ids(addresses: Addresses, shift: int, width: int, ids_N: Ids) -> None:
    for slot in range(ids_N.size):
        ids_N[slot] = id_of(addresses, shift, width, slot)
