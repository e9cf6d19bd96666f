"""Kernels of the index: the hash table from ids to slots."""
# U = unique ids

from __future__ import annotations

import numpy as np

from shardkeep.base.array_kernels import prefetch
from shardkeep.base.arrays import Ids, Ints, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.shard.table.layout_kernels import fetch, id_of, record, write_id

IDS_AT_ONCE = 128  # whose entries and records are on their way from memory at the same time

_LOW32 = np.uint64(0xFFFFFFFF)
_32, _1, _0 = np.uint64(32), np.uint64(1), np.uint64(0)
_KEY_SHIFT = np.uint64(26)  # half of the bits that a key has in its bucket: no product overflows

# The index is open addressing with linear probing. Entry = (32 bits of the hash | slot + 1), 0 = empty; the id itself
# is compared in the record. Of n entries, `hash * n >> 32` is the first of a hash's chain: chains start in the order of
# the hashes for every n, so an index grows by any factor and moves from one array into another front to back.
#
# The hash of an id is its placement key, scaled so that the keys of the server's buckets take all 32 bits: the ids of
# a bucket are neighbours, and a range of buckets is a range of entries. Hence rows that come in the order of their keys
# must find an index that is large enough for all of them (`RowIndex.make_room_for`).
#
# The first words of an array: a bound, the first key, and the factor of the scale; the entries follow. Ids whose hashes
# are below the bound of `old` are in `entries`, the others still in `old`.
BOUND, LOWEST_KEY, FACTOR = 0, 1, 2
FIRST = 3
_FIRST = np.uint64(FIRST)


@kernel("uint64(uint64[::1], int64)")
def hash_of(entries: UInt64s, id_: int) -> np.uint64:
    """32 bits that rise with the placement key of an id."""
    hash_: np.uint64 = ((mix(np.uint64(id_)) - entries[LOWEST_KEY]) >> _KEY_SHIFT) * entries[FACTOR] >> _KEY_SHIFT
    return hash_ & _LOW32


@kernel("void(uint64[::1], int64[::1], uint64[::1])")
def hashes_of(entries: UInt64s, ids_U: Ids, hashes_U: UInt64s) -> None:
    for i in range(ids_U.size):
        hashes_U[i] = hash_of(entries, ids_U[i])


@kernel("uint64(uint64[::1], uint64)")
def home(entries: UInt64s, hash_: np.uint64) -> np.uint64:
    """The first entry of a hash's chain."""
    at: np.uint64 = (hash_ * np.uint64(entries.size - FIRST) >> _32) + _FIRST
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
            at = _FIRST


@kernel("int64(uint64[::1], uint64[::1], int64, int64[::1], int64, int64)")
def probe_either(entries: UInt64s, old: UInt64s, id_: int, addresses: Ints, shift: int, width: int) -> int:
    """As `probe`, in the array that has the id's hash."""
    hash_ = hash_of(entries, id_)
    if hash_ < old[BOUND]:
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
            at = _FIRST


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
    bound = old[BOUND]
    for i in range(begin, end):
        hash_ = hash_of(entries, ids_U[i])
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
                position, hash_ = np.uint64(-1 - slot), hash_of(entries, ids_U[i])
                slot = count
                count += 1
                write_id(addresses, shift, width, slot, ids_U[i])
                entry = hash_ << _32 | np.uint64(slot + 1)
                if hash_ < old[BOUND]:
                    entries[position] = entry
                else:
                    old[position] = entry
            slots_U[i] = slot
    return count


@kernel("int64(uint64[::1])")
def first_empty(entries: UInt64s) -> int:
    """The position of the first empty entry."""
    at = FIRST
    while entries[at] != _0:
        at += 1
    return at


@kernel("uint64(uint64[::1], uint64, uint64)")
def position_of(entries: UInt64s, hash_: np.uint64, entry: np.uint64) -> np.uint64:
    """The position of an entry that is there, or the end of a chain: `entry` 0."""
    size = np.uint64(entries.size)
    at = home(entries, hash_)
    while entries[at] != entry:
        at += _1
        if at == size:
            at = _FIRST
    return at


@kernel("void(uint64[::1], uint64[::1], int64, int64)")
def move_entries(entries: UInt64s, old: UInt64s, begin: int, end: int) -> None:
    """Copies the entries of `old` whose chains start at [begin, end) into `entries`, and raises the bound."""
    size, first, last = np.uint64(old.size), np.uint64(begin), np.uint64(end)
    at, turn = first, False
    while turn or at < last or old[at] != _0:
        entry = old[at]
        start = home(old, entry >> _32)
        if entry != _0 and first <= start and start < last and (start > at) == turn:  # start > at: behind the turn
            entries[position_of(entries, entry >> _32, _0)] = entry
        at += _1
        if at == size:
            at, turn = _FIRST, True
        if turn and old[at] == _0:
            break
    # The least hash whose chain starts at `end` or later.
    n = size - _FIRST
    old[BOUND] = (((last - _FIRST) << _32) + n - _1) // n


@kernel("int64(uint64[::1], uint64, uint64, int64[::1], int64)")
def _slots_in(entries: UInt64s, first: np.uint64, end: np.uint64, slots: Ints, count: int) -> int:
    """Appends the slots of one array's entries with hashes [first, end)."""
    size, last_home = np.uint64(entries.size), home(entries, end - _1)
    at, turn = home(entries, first), False
    while turn or at <= last_home or entries[at] != _0:
        entry = entries[at]
        hash_ = entry >> _32
        # home > at: behind the turn
        if entry != _0 and first <= hash_ and hash_ < end and (home(entries, hash_) > at) == turn:
            if count < slots.size:
                slots[count] = np.int64(entry & _LOW32) - 1
            count += 1
        at += _1
        if at == size:
            at, turn = _FIRST, True
        if turn and entries[at] == _0:
            break
    return count


@kernel("int64(uint64[::1], uint64[::1], uint64, uint64, int64[::1])")
def slots_between(entries: UInt64s, old: UInt64s, first: np.uint64, end: np.uint64, slots: Ints) -> int:
    """Slots of the rows whose hashes are in [first, end), and their number. Where it exceeds `slots`, the rest is left
    out."""
    count, bound = 0, old[BOUND]
    if first < min(end, bound):
        count = _slots_in(entries, first, min(end, bound), slots, count)
    if max(first, bound) < end:
        count = _slots_in(old, max(first, bound), end, slots, count)
    return count


@kernel("void(uint64[::1], uint64)")
def erase(entries: UInt64s, at: np.uint64) -> None:
    """Empties an entry. Those behind it that it had displaced move up: no tombstone stays."""
    size, n = np.uint64(entries.size), np.uint64(entries.size - FIRST)
    hole, at = at, at + _1
    if at == size:
        at = _FIRST
    while entries[at] != _0:
        start = home(entries, entries[at] >> _32)
        if (at + n - start) % n >= (at + n - hole) % n:  # its chain starts at the hole or before
            entries[hole] = entries[at]
            hole = at
        at += _1
        if at == size:
            at = _FIRST
    entries[hole] = _0


@kernel("void(uint64[::1], uint64[::1], int64[::1], int64, int64, int64, int64)")
def remove(entries: UInt64s, old: UInt64s, addresses: Ints, shift: int, width: int, slot: int, last: int) -> None:
    """Removes the row in `slot`. The row in `last`, the highest slot, moves there."""
    hash_ = hash_of(entries, id_of(addresses, shift, width, slot))
    among = entries if hash_ < old[BOUND] else old
    erase(among, position_of(among, hash_, hash_ << _32 | np.uint64(slot + 1)))
    if slot != last:
        hash_ = hash_of(entries, id_of(addresses, shift, width, last))
        among = entries if hash_ < old[BOUND] else old
        among[position_of(among, hash_, hash_ << _32 | np.uint64(last + 1))] = hash_ << _32 | np.uint64(slot + 1)
        row, to = record(addresses, shift, width, last), record(addresses, shift, width, slot)
        for w in range(width):
            to[w] = row[w]
