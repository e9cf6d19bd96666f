"""Kernels of the index: the hash table from ids to slots."""
# U = unique ids

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import int64, uint64, void

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Ids, Ints, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS, INTS, TABLE, Descriptor, RecordBlocks
from shardkeep.ps.server.table.layout_kernels import fetch, id_of, record, write_id

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

_ENTRIES = uint64[::1]


@kernel(_ENTRIES(TABLE))
def entries_of(table: Descriptor) -> UInt64s:
    entries: UInt64s = carray(pointer(table.index.entries), (table.index.num_entries,), np.uint64)
    return entries


@kernel(_ENTRIES(TABLE))
def old_of(table: Descriptor) -> UInt64s:
    """Entries not yet moved."""
    old: UInt64s = carray(pointer(table.index.old), (table.index.num_old,), np.uint64)
    return old


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


@kernel(int64(_ENTRIES, uint64, int64, BLOCKS))
def probe(entries: UInt64s, hash_: np.uint64, id_: int, blocks: RecordBlocks) -> int:
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
            if id_of(blocks, slot) == id_:
                return slot
        at += _1
        if at == size:
            at = _FIRST


@kernel(int64(_ENTRIES, _ENTRIES, int64, BLOCKS))
def probe_either(entries: UInt64s, old: UInt64s, id_: int, blocks: RecordBlocks) -> int:
    """As `probe`, in the array that has the id's hash."""
    hash_ = hash_of(entries, id_)
    return probe(entries if hash_ < old[BOUND] else old, hash_, id_, blocks)


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


@kernel(void(TABLE, INTS, int64, int64, INTS))
def guess_slots(table: Descriptor, ids_U: Ids, begin: int, end: int, slots_U: Ints) -> None:
    """Guesses for ids [begin, end), and asks for the records they name.

    No step waits for the memory of another id: first all entries are requested, then all records."""
    entries, old, blocks = entries_of(table), old_of(table), table.blocks
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
            fetch(blocks, slot)


@kernel(void(TABLE, INTS, INTS))
def find(table: Descriptor, ids_U: Ids, slots_U: Ints) -> None:
    """Slots of ids, -1 where absent."""
    entries, old, blocks = entries_of(table), old_of(table), table.blocks
    for begin in range(0, ids_U.size, IDS_AT_ONCE):
        end = min(begin + IDS_AT_ONCE, ids_U.size)
        guess_slots(table, ids_U, begin, end, slots_U)
        for i in range(begin, end):
            slot = slots_U[i]
            if slot >= 0 and id_of(blocks, slot) != ids_U[i]:
                slots_U[i] = max(probe_either(entries, old, ids_U[i], blocks), -1)


@kernel(void(TABLE, INTS, INTS))
def find_or_add(table: Descriptor, ids_U: Ids, slots_U: Ints) -> None:
    """Slots of ids; absent ones get slots from `count` on, and their ids are written.

    The caller has made room: entries and records for all ids."""
    entries, old, blocks, count = entries_of(table), old_of(table), table.blocks, table.count
    for begin in range(0, ids_U.size, IDS_AT_ONCE):
        end = min(begin + IDS_AT_ONCE, ids_U.size)
        guess_slots(table, ids_U, begin, end, slots_U)
        for i in range(begin, end):
            slot = slots_U[i]
            if slot >= 0 and id_of(blocks, slot) == ids_U[i]:
                continue
            slot = probe_either(entries, old, ids_U[i], blocks)
            if slot < 0:
                position, hash_ = np.uint64(-1 - slot), hash_of(entries, ids_U[i])
                slot = count
                count += 1
                write_id(blocks, slot, ids_U[i])
                entry = hash_ << _32 | np.uint64(slot + 1)
                if hash_ < old[BOUND]:
                    entries[position] = entry
                else:
                    old[position] = entry
            slots_U[i] = slot
    table.count = count


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


@kernel(int64(TABLE, uint64, uint64, INTS))
def slots_between(table: Descriptor, first: np.uint64, end: np.uint64, slots: Ints) -> int:
    """Slots of the rows whose hashes are in [first, end), and their number. Where it exceeds `slots`, the rest is left
    out."""
    entries, old = entries_of(table), old_of(table)
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


@kernel(void(TABLE, int64))
def remove(table: Descriptor, slot: int) -> None:
    """Removes the row in `slot`. The row in the highest slot moves there."""
    entries, old, blocks, last = entries_of(table), old_of(table), table.blocks, table.count - 1
    table.count = last
    hash_ = hash_of(entries, id_of(blocks, slot))
    among = entries if hash_ < old[BOUND] else old
    erase(among, position_of(among, hash_, hash_ << _32 | np.uint64(slot + 1)))
    if slot != last:
        hash_ = hash_of(entries, id_of(blocks, last))
        among = entries if hash_ < old[BOUND] else old
        among[position_of(among, hash_, hash_ << _32 | np.uint64(last + 1))] = hash_ << _32 | np.uint64(slot + 1)
        row, to = record(blocks, last), record(blocks, slot)
        for w in range(row.size):
            to[w] = row[w]
