"""Kernels of a pool's slots: the index from (table, id) to slots, the list of free ones, and the log to undo changes.

A pool is one array, int64 (`Pool`): its control numbers, then where its arrays lie (the columns below). The callers
keep these alive and give the log enough room. What a slot's numbers mean is their business.
"""
# S = slots, H = columns of a slot as int64, F = as float32, W = values of a slot's state, L = entries of the log

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.core.types import boolean, float32, int64, uint64, void

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Floats, Ints, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix

Pool = npt.NDArray[np.int64]

# Columns of a slot: a head of one cache line, then its state. A free slot has no flags, and its ID is the next, or -1.
ID, TABLE, FLAGS, COUNT, READ, STAMP = 0, 1, 2, 3, 4, 5  # COUNT: gradients in the residual
HEAD = 8
SQUARES, SCORE, STATE = 14, 15, 16  # columns of the same memory as float32; the state begins at STATE
USED, UNSENT, CACHED, TOUCHED = 1, 2, 4, 8  # flags: in the index; has a residual; has a row; whose row was used
# Columns of a pool. First the control numbers; a slot whose STAMP is SERIAL is noted in the log that is written now.
HAND, FREE, NUM_UNSENT, LOST_ROWS, LOST_SQUARES, SERIAL, LOGGED = 0, 1, 2, 3, 4, 5, 6
CONTROL = 7  # LOST_SQUARES is a float64
CAPACITY, COLUMNS, ENTRIES, LOG_ROOM = 7, 8, 9, 10  # sizes; COLUMNS: of a slot, as int64; LOG_ROOM: 0 = no log is kept
SLOTS_AT, INDEX_AT, LOG_AT = 11, 12, 13  # places

ROWS_AT_ONCE = 64  # whose index entries and slots are on their way from memory at the same time
AHEAD = 12  # slots fetched ahead of the one in work
CANDIDATES = 8  # slots looked at for one to give away


POOL = int64[::1]
INTS = types.Array(int64, 1, "C", readonly=True)

_LOW32 = np.uint64(0xFFFFFFFF)
_32, _1, _0 = np.uint64(32), np.uint64(1), np.uint64(0)


@kernel(int64[:, ::1](POOL))
def heads_of(pool: Pool) -> Ints:
    """The slots."""
    heads_SH: Ints = carray(pointer(pool[SLOTS_AT]), (pool[CAPACITY], pool[COLUMNS]), np.int64)
    return heads_SH


@kernel(float32[:, ::1](POOL))
def floats_of(pool: Pool) -> Floats:
    """The slots as float32, for SQUARES, SCORE and the state."""
    floats_SF: Floats = carray(pointer(pool[SLOTS_AT]), (pool[CAPACITY], 2 * pool[COLUMNS]), np.float32)
    return floats_SF


@kernel(int64[:, ::1](POOL))
def log_of(pool: Pool) -> Ints:
    """The entries of the log: a slot's number, and what it held."""
    log_LH: Ints = carray(pointer(pool[LOG_AT]), (pool[LOG_ROOM], 1 + pool[COLUMNS]), np.int64)
    return log_LH


@kernel(uint64[::1](POOL))
def index_of(pool: Pool) -> UInt64s:
    """The entries of the index."""
    entries: UInt64s = carray(pointer(pool[INDEX_AT]), (pool[ENTRIES],), np.uint64)
    return entries


@kernel(uint64(int64, int64))
def hash_of(table: int, id_: int) -> np.uint64:
    """32 bits of a hash of both numbers."""
    return mix(np.uint64(id_) + np.uint64(table + 1) * GOLDEN) >> _32


# The index is open addressing with linear probing: a power of two of entries, (32 bits of the hash | slot + 1) or
# 0 = empty, at most half of them taken. Removing one moves later ones of its chain back, so that no chain has a hole.


@kernel(int64(uint64[::1], int64[:, ::1], int64, int64))
def find(entries: UInt64s, heads_SH: Ints, table: int, id_: int) -> int:
    """The slot of a row, -1 if it has none."""
    hash_ = hash_of(table, id_)
    mask = np.uint64(entries.size - 1)
    at = hash_ & mask
    while entries[at] != _0:
        if entries[at] >> _32 == hash_:
            slot: int = np.int64(entries[at] & _LOW32) - 1  # type: ignore[assignment]
            if heads_SH[slot, ID] == id_ and heads_SH[slot, TABLE] == table:
                return slot
        at = (at + _1) & mask
    return -1


@kernel(void(POOL, int64[::1], int64))
def fetch(pool: Pool, slots_V: Ints, v: int) -> None:
    """Asks for what slot `slots[v]` holds, if there is one: slots lie anywhere, and a loop over them would wait for
    memory slot by slot."""
    if v < slots_V.size and slots_V[v] >= 0:
        size = pool[COLUMNS] * 8
        start = pool[SLOTS_AT] + slots_V[v] * size
        line = start
        while line < start + size:  # `range` with a step would divide
            prefetch(line)
            line += 64


@kernel(void(POOL, int64, INTS, int64, int64, int64[::1]))
def find_rows(pool: Pool, table: int, ids_V: Ints, begin: int, end: int, slots_V: Ints) -> None:
    """Slots of a table's rows [begin, end), at most ROWS_AT_ONCE, -1 where there is none; what they hold is on its way.

    No step waits for the memory of another row: first all index entries are requested, then all slots."""
    entries, heads_SH = index_of(pool), heads_of(pool)
    mask = np.uint64(entries.size - 1)
    for v in range(begin, end):
        hash_ = hash_of(table, ids_V[v])
        slots_V[v] = np.int64(hash_)
        prefetch(pool[INDEX_AT] + np.int64(hash_ & mask) * 8)
    for v in range(begin, end):
        hash_ = np.uint64(slots_V[v])
        at = hash_ & mask
        while entries[at] != _0 and entries[at] >> _32 != hash_:
            at = (at + _1) & mask
        slots_V[v] = np.int64(entries[at] & _LOW32) - 1
        fetch(pool, slots_V, v)
    for v in range(begin, end):
        slot = slots_V[v]
        if slot >= 0 and not (heads_SH[slot, ID] == ids_V[v] and heads_SH[slot, TABLE] == table):
            slots_V[v] = find(entries, heads_SH, table, ids_V[v])  # another row has the same hash


@kernel(void(uint64[::1], int64, int64, int64))
def enter(entries: UInt64s, table: int, id_: int, slot: int) -> None:
    """Adds a row that is not in the index."""
    hash_ = hash_of(table, id_)
    mask = np.uint64(entries.size - 1)
    at = hash_ & mask
    while entries[at] != _0:
        at = (at + _1) & mask
    entries[at] = (hash_ << _32) | np.uint64(slot + 1)


@kernel(void(uint64[::1], int64, int64, int64))
def leave(entries: UInt64s, table: int, id_: int, slot: int) -> None:
    """Removes a row that is in the index."""
    hash_ = hash_of(table, id_)
    mask = np.uint64(entries.size - 1)
    entry = (hash_ << _32) | np.uint64(slot + 1)
    hole = hash_ & mask
    while entries[hole] != entry:
        hole = (hole + _1) & mask
    at = hole
    while True:
        at = (at + _1) & mask
        if entries[at] == _0:
            break
        home = (entries[at] >> _32) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):  # its chain goes through the hole
            entries[hole] = entries[at]
            hole = at
    entries[hole] = _0


@kernel(void(POOL, int64))
def touch(pool: Pool, slot: int) -> None:
    """Call it before a slot changes: notes what it holds, except the cached row, once for each log."""
    heads_SH = heads_of(pool)
    if heads_SH[slot, STAMP] != pool[SERIAL]:
        if pool[LOG_ROOM]:
            log_LH, at = log_of(pool), pool[LOGGED]
            log_LH[at, 0] = slot
            for h in range(heads_SH.shape[1]):
                log_LH[at, 1 + h] = heads_SH[slot, h]
            pool[LOGGED] = at + 1
        heads_SH[slot, STAMP] = pool[SERIAL]


@kernel(void(POOL, int64))
def clear_stats(pool: Pool, slot: int) -> None:
    """No unsent gradient."""
    heads_SH, floats_SF = heads_of(pool), floats_of(pool)
    heads_SH[slot, COUNT] = 0
    floats_SF[slot, SQUARES], floats_SF[slot, SCORE] = np.float32(0.0), np.float32(0.0)


@kernel(void(POOL, int64, int64, int64))
def occupy(pool: Pool, slot: int, table: int, id_: int) -> None:
    """Gives a slot to a row that has none: the first of the free ones, or one that another row has."""
    heads_SH, entries = heads_of(pool), index_of(pool)
    touch(pool, slot)
    if heads_SH[slot, FLAGS] == 0:
        pool[FREE] = heads_SH[slot, ID]
    else:
        leave(entries, heads_SH[slot, TABLE], heads_SH[slot, ID], slot)
        if heads_SH[slot, FLAGS] & UNSENT:
            pool[NUM_UNSENT] -= 1
    heads_SH[slot, ID], heads_SH[slot, TABLE], heads_SH[slot, FLAGS] = id_, table, USED
    heads_SH[slot, READ] = -1
    clear_stats(pool, slot)
    enter(entries, table, id_, slot)


@kernel(void(POOL, int64))
def settle(pool: Pool, slot: int) -> None:
    """A slot whose residual is zero from now on; it becomes free unless it has a cached row."""
    heads_SH, entries = heads_of(pool), index_of(pool)
    touch(pool, slot)
    if heads_SH[slot, FLAGS] & UNSENT:
        pool[NUM_UNSENT] -= 1
    heads_SH[slot, FLAGS] &= ~UNSENT
    clear_stats(pool, slot)
    if not heads_SH[slot, FLAGS] & CACHED:
        leave(entries, heads_SH[slot, TABLE], heads_SH[slot, ID], slot)
        heads_SH[slot, FLAGS], heads_SH[slot, ID] = 0, pool[FREE]
        pool[FREE] = slot


@kernel(int64(POOL, boolean))
def give_away(pool: Pool, only_clean: bool) -> int:
    """A slot to be had: a free one, else the next of CANDIDATES under the hand that has no residual, else (not
    `only_clean`) the one of them with the least score; -1 = none. Slots of this step's rows are left alone when one
    with a residual is wanted."""
    heads_SH, floats_SF = heads_of(pool), floats_of(pool)
    if pool[FREE] >= 0:
        return pool[FREE]  # type: ignore[no-any-return]
    size = heads_SH.shape[0]
    if only_clean and pool[NUM_UNSENT] == size:
        return -1
    best = -1
    for _ in range(min(CANDIDATES, size)):
        slot = pool[HAND]
        pool[HAND] = slot + 1 if slot + 1 < size else 0
        if not only_clean and heads_SH[slot, STAMP] == pool[SERIAL]:
            continue
        if not heads_SH[slot, FLAGS] & UNSENT:
            return slot  # type: ignore[no-any-return]
        if not only_clean and (best < 0 or floats_SF[slot, SCORE] < floats_SF[best, SCORE]):
            best = slot
    return best


@kernel(void(POOL))
def forget_rows(pool: Pool) -> None:
    """No slot has a cached row any more; those without a residual become free."""
    heads_SH = heads_of(pool)
    for slot in range(heads_SH.shape[0]):
        flags = heads_SH[slot, FLAGS]
        if flags & CACHED:
            touch(pool, slot)
            heads_SH[slot, FLAGS] = flags & ~(CACHED | TOUCHED)
            heads_SH[slot, READ] = -1
            if not flags & UNSENT:
                settle(pool, slot)


@kernel(void(POOL))
def rebuild(pool: Pool) -> None:
    """Makes the index again from the heads."""
    heads_SH, entries = heads_of(pool), index_of(pool)
    entries[:] = _0
    for slot in range(heads_SH.shape[0]):
        if heads_SH[slot, FLAGS]:
            enter(entries, heads_SH[slot, TABLE], heads_SH[slot, ID], slot)
