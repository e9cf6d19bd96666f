"""Kernels of the index: the hash table from ids to slots."""
# U = unique ids

from __future__ import annotations

import numpy as np

from shardkeep.base.array_kernels import prefetch
from shardkeep.base.arrays import Ids, Ints, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix
from shardkeep.ps.shard.table.layout_kernels import fetch, id_of, write_id

IDS_AT_ONCE = 128  # whose entries and records are on their way from memory at the same time

_LOW32 = np.uint64(0xFFFFFFFF)
_32, _1, _0 = np.uint64(32), np.uint64(1), np.uint64(0)


# The index is open addressing with linear probing. Entry = (32 bits of the hash | slot + 1), 0 = empty; the id itself
# is compared in the record. Of n entries, `hash * n >> 32` is the first of a hash's chain: chains start in the order of
# the hashes for every n, so an index grows by any factor and moves from one array into another front to back.
#
# Word 0 of an array is a bound, the entries follow. Ids whose hashes are below the bound of `old` are in `entries`,
# the others still in `old`.


@kernel("uint64(int64)")
def hash_of(id_: int) -> np.uint64:
    """32 bits of an id's hash; placement takes its bits from another one."""
    hash_: np.uint64 = mix(np.uint64(id_) + GOLDEN) >> _32
    return hash_


@kernel("uint64(uint64[::1], uint64)")
def home(entries: UInt64s, hash_: np.uint64) -> np.uint64:
    """The first entry of a hash's chain."""
    at: np.uint64 = (hash_ * np.uint64(entries.size - 1) >> _32) + _1
    return at


@kernel("int64(uint64[::1], uint64, int64, int64[::1], int64, int64)")
def probe(entries: UInt64s, hash_: np.uint64, id_: int, addresses: Ints, shift: int, width: int) -> int:
    """The slot of an id, or -1 - (position of the empty entry that ends its chain)."""
    slot: int
    size = np.uint64(entries.size)
    at = home(entries, hash_)
    while True:
        entry = entries[at]
        if entry == _0:
            slot = -1 - np.int64(at)  # type: ignore[assignment]
            return slot
        if entry >> _32 == hash_:
            slot = np.int64(entry & _LOW32) - 1  # type: ignore[assignment]
            if id_of(addresses, shift, width, slot) == id_:
                return slot
        at += _1
        if at == size:
            at = _1


@kernel("int64(uint64[::1], uint64[::1], int64, int64[::1], int64, int64)")
def probe_either(entries: UInt64s, old: UInt64s, id_: int, addresses: Ints, shift: int, width: int) -> int:
    """As `probe`, in the array that has the id's hash."""
    hash_ = hash_of(id_)
    if hash_ < old[0]:
        return probe(entries, hash_, id_, addresses, shift, width)
    return probe(old, hash_, id_, addresses, shift, width)


@kernel("int64(uint64[::1], uint64)")
def guess(entries: UInt64s, hash_: np.uint64) -> int:
    """The slot of the first entry of a hash, -1 if there is none. Another id may have the same hash."""
    size = np.uint64(entries.size)
    at = home(entries, hash_)
    while True:
        entry = entries[at]
        if entry == _0:
            return -1
        if entry >> _32 == hash_:
            slot: int = np.int64(entry & _LOW32) - 1  # type: ignore[assignment]
            return slot
        at += _1
        if at == size:
            at = _1


@kernel("void(uint64[::1], uint64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64[::1])")
def guess_slots(
    entries: UInt64s,
    old: UInt64s,
    ids_U: Ids,
    addresses: Ints,
    shift: int,
    width: int,
    begin: int,
    end: int,
    slots_U: Ints,
) -> None:
    """Guesses for ids [begin, end), and asks for the records they name.

    No step waits for the memory of another id: first all entries are requested, then all records."""
    bound = old[0]
    for i in range(begin, end):
        hash_ = hash_of(ids_U[i])
        slots_U[i] = np.int64(hash_)
        if hash_ < bound:
            prefetch(entries.ctypes.data + np.int64(home(entries, hash_)) * 8)
        else:
            prefetch(old.ctypes.data + np.int64(home(old, hash_)) * 8)
    for i in range(begin, end):
        hash_ = np.uint64(slots_U[i])
        slot = guess(entries, hash_) if hash_ < bound else guess(old, hash_)
        slots_U[i] = slot
        if slot >= 0:
            fetch(addresses, shift, width, slot)


@kernel("void(uint64[::1], uint64[::1], int64[::1], int64[::1], int64, int64, int64[::1])")
def find(entries: UInt64s, old: UInt64s, ids_U: Ids, addresses: Ints, shift: int, width: int, slots_U: Ints) -> None:
    """Slots of ids, -1 where absent."""
    for begin in range(0, ids_U.size, IDS_AT_ONCE):
        end = min(begin + IDS_AT_ONCE, ids_U.size)
        guess_slots(entries, old, ids_U, addresses, shift, width, begin, end, slots_U)
        for i in range(begin, end):
            slot = slots_U[i]
            if slot >= 0 and id_of(addresses, shift, width, slot) != ids_U[i]:
                slots_U[i] = max(probe_either(entries, old, ids_U[i], addresses, shift, width), -1)


@kernel("int64(uint64[::1], uint64[::1], int64[::1], int64[::1], int64, int64, int64, int64[::1])")
def find_or_add(
    entries: UInt64s,
    old: UInt64s,
    ids_U: Ids,
    addresses: Ints,
    shift: int,
    width: int,
    count: int,
    slots_U: Ints,
) -> int:
    """Slots of ids; absent ones get slots from `count` on and their ids are written. Returns the new count.

    The caller has made room: entries and records for all ids."""
    for begin in range(0, ids_U.size, IDS_AT_ONCE):
        end = min(begin + IDS_AT_ONCE, ids_U.size)
        guess_slots(entries, old, ids_U, addresses, shift, width, begin, end, slots_U)
        for i in range(begin, end):
            slot = slots_U[i]
            if slot >= 0 and id_of(addresses, shift, width, slot) == ids_U[i]:
                continue
            slot = probe_either(entries, old, ids_U[i], addresses, shift, width)
            if slot < 0:
                position, hash_ = np.uint64(-1 - slot), hash_of(ids_U[i])
                slot = count
                count += 1
                write_id(addresses, shift, width, slot, ids_U[i])
                entry = hash_ << _32 | np.uint64(slot + 1)
                if hash_ < old[0]:
                    entries[position] = entry
                else:
                    old[position] = entry
            slots_U[i] = slot
    return count


@kernel("int64(uint64[::1])")
def first_empty(entries: UInt64s) -> int:
    """The position of the first empty entry."""
    at = 1
    while entries[at] != _0:
        at += 1
    return at


@kernel("void(uint64[::1], uint64)")
def put(entries: UInt64s, entry: np.uint64) -> None:
    """Puts an entry that is not there at the end of its chain."""
    size = np.uint64(entries.size)
    at = home(entries, entry >> _32)
    while entries[at] != _0:
        at += _1
        if at == size:
            at = _1
    entries[at] = entry


@kernel("void(uint64[::1], uint64[::1], int64, int64)")
def move_entries(entries: UInt64s, old: UInt64s, begin: int, end: int) -> None:
    """Copies the entries of `old` whose chains start at [begin, end) into `entries`, and raises the bound."""
    size, first, last = np.uint64(old.size), np.uint64(begin), np.uint64(end)
    at, turn = first, False
    while turn or at < last or old[at] != _0:
        entry = old[at]
        start = home(old, entry >> _32)
        if entry != _0 and first <= start and start < last and (start > at) == turn:  # start > at: behind the turn
            put(entries, entry)
        at += _1
        if at == size:
            at, turn = _1, True
        if turn and old[at] == _0:
            break
    # The least hash whose chain starts at `end` or later.
    n = size - _1
    old[0] = (((last - _1) << _32) + n - _1) // n
