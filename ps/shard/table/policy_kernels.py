"""Kernels of a table's policies: the counters of rows, rows that go, and ids that are counted before they become rows.

A row's counters are the last two words of its record: the clock of its last push (a step, or seconds), uint32, and its
score at that clock, float32. A row of `rules`, float64, says which rows go (the columns below).
"""
# U = unique ids, B = buckets

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Float64s, Ids, Ints, Rows, UInt32s, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.placement_kernels import bucket
from shardkeep.ps.shard.table.index_kernels import (
    BOUND,
    IDS_AT_ONCE,
    find,
    hash_of,
    home,
    remove,
    slots_between,
)
from shardkeep.ps.shard.table.layout_kernels import fetch, id_of, prefetch_record, record, start_of
from shardkeep.ps.shard.table.pre_image_kernels import ROWS as SNAPSHOT_ROWS
from shardkeep.ps.shard.table.pre_image_kernels import keep
from shardkeep.ps.shard.table.table_kernels import (
    ADDRESSES,
    CHANGED,
    COUNT,
    COUNTERS,
    ENTRIES,
    EVICTED,
    NUM_ADDRESSES,
    NUM_CHANGED,
    NUM_ENTRIES,
    NUM_OLD,
    OLD,
    REMOVED,
    SHIFT,
    WIDTH,
    Descriptors,
)

Matrix = npt.NDArray[np.float64]
Ranges = npt.NDArray[np.uint64]

# What decides which rows go.
TTL = 0  # clock ticks without a push; 0 = any number
BELOW = 1  # score; 0 = any score
LOG_DECAY = 2  # of a score in one tick
BY_SCORE = 3  # 1 = the lowest scores go first, 0 = the oldest pushes
CAPACITY = 4  # rows of a bucket; 0 = any number
RULES = 5

_32 = np.uint64(32)
_OLDEST = np.uint64(0xFFFFFFFE)
_NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)  # rank of a pinned row


@kernel("float64(float64, float64, float64)")
def decayed(score: float, ticks: float, log_decay: float) -> float:
    """A score so many ticks later."""
    return score * np.exp(log_decay * ticks) if log_decay != 0.0 else score


@kernel("void(int64[::1], int64[::1], int64, float32[::1], float64)")
def touch(descriptor: Ints, slots_U: Ints, clock: int, pushes_U: Rows, log_decay: float) -> None:
    """Counts pushes of rows at a clock: `pushes`, or one each if it is empty."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, at = descriptor[SHIFT], descriptor[WIDTH], 4 * descriptor[COUNTERS]
    for i in range(slots_U.size):
        counters = start_of(addresses, shift, width, slots_U[i]) + at
        clocks, scores = carray(pointer(counters), (1,), np.uint32), carray(pointer(counters + 4), (1,), np.float32)
        score = decayed(np.float64(scores[0]), np.float64(clock - np.int64(clocks[0])), log_decay)
        scores[0] = np.float32(score + (pushes_U[i] if pushes_U.size else 1.0))
        clocks[0] = np.uint32(clock)


@kernel("void(int64[::1], int64)")
def reset_counters(descriptor: Ints, first: int) -> None:
    """Zeros the counters of rows in slots from `first` on, which are new."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    at = descriptor[COUNTERS]
    for slot in range(first, descriptor[COUNT]):
        row = record(addresses, descriptor[SHIFT], descriptor[WIDTH], slot)
        row[at] = row[at + 1] = np.float32(0.0)


@kernel("int64(int64[::1], int64, int64[::1], int64, int64[::1], int64)")
def count_rows(descriptor: Ints, first: int, counts_B: Ints, capacity: int, over_B: Ints, num_over: int) -> int:
    """Adds the rows in slots from `first` on to the rows of their buckets, and appends the buckets that begin to exceed
    `capacity` to `over`. Returns their number."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    for slot in range(first, descriptor[COUNT]):
        b = bucket(id_of(addresses, descriptor[SHIFT], descriptor[WIDTH], slot))
        counts_B[b] += 1
        if counts_B[b] == capacity + 1:
            over_B[num_over] = b
            num_over += 1
    return num_over


@kernel("boolean(int64[::1], int64)")
def _is_among(ids: Ids, id_: int) -> bool:
    """Whether an id is among ids that rise."""
    place = np.searchsorted(ids, id_)
    found: bool = place < ids.size and ids[place] == id_  # type: ignore[assignment]
    return found


@kernel(
    "int64(int64[::1], int64[::1], uint64, int64[::1], int64, int64, float64[::1], int64[::1], int64, int64,"
    " int64[::1])"
)
def lowest(
    descriptor: Ints,
    buckets_O: Ints,
    factor: np.uint64,
    counts_B: Ints,
    first_bucket: int,
    clock: int,
    rules: Float64s,
    pinned: Ids,
    capacity: int,
    cut: int,
    slots: Ints,
) -> int:
    """The slots of the lowest rows of each bucket with more rows than `capacity`, down to `cut` below it, and their
    number. Rows of equal rank go by their placement keys, which are the same on any number of servers."""
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, at = descriptor[SHIFT], descriptor[WIDTH], descriptor[COUNTERS]
    count = 0
    score_word = np.empty(1, np.float32)
    score_bits = score_word.view(np.uint32)
    for o in range(buckets_O.size):
        begin = np.uint64(buckets_O[o] - first_bucket) * factor
        slots_U = np.empty(counts_B[buckets_O[o]], np.int64)
        found = min(slots_between(entries, old, begin, begin + factor, slots_U), slots_U.size)
        if found <= capacity:
            continue
        excess = found - capacity + cut
        ranks_U, keys_U = np.empty(found, np.uint64), np.empty(found, np.uint64)
        for i in range(found):
            prefetch_record(addresses, shift, width, slots_U, i)
            row = record(addresses, shift, width, slots_U[i])
            age = clock - np.int64(row.view(np.uint32)[at])
            score_word[0] = np.float32(decayed(np.float64(row[at + 1]), np.float64(age), rules[LOG_DECAY]))
            young = _OLDEST - np.uint64(age)
            score = np.uint64(score_bits[0])
            ranks_U[i] = score << _32 | young if rules[BY_SCORE] != 0.0 else young << _32 | score
            id_ = row.view(np.int64)[0]
            keys_U[i] = mix(np.uint64(id_))
            if _is_among(pinned, id_):
                ranks_U[i] = _NEVER
        highest = np.sort(ranks_U)[excess - 1]
        if highest == _NEVER:
            continue
        ties = np.sort(keys_U[ranks_U == highest])
        last_key = ties[excess - 1 - (ranks_U < highest).sum()]
        for i in range(found):
            if ranks_U[i] < highest or (ranks_U[i] == highest and keys_U[i] <= last_key):
                slots[count] = slots_U[i]
                count += 1
    return count


@kernel(
    "int64(int64[::1], uint64[::1], uint64[::1], uint64, uint64, int64, float64[::1], int64[::1], int64[::1], int64)"
)
def expired(
    descriptor: Ints,
    entries: UInt64s,
    old: UInt64s,
    first: np.uint64,
    end: np.uint64,
    clock: int,
    rules: Float64s,
    pinned: Ids,
    slots: Ints,
    count: int,
) -> int:
    """Appends the slots of rows with hashes [first, end) that are too old or score too low, except pinned ones;
    returns their number."""
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, at = descriptor[SHIFT], descriptor[WIDTH], descriptor[COUNTERS]
    slots_U = np.empty(0, np.int64)
    slots_U = np.empty(slots_between(entries, old, first, end, slots_U), np.int64)
    slots_between(entries, old, first, end, slots_U)
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        row = record(addresses, shift, width, slots_U[i])
        age = clock - np.int64(row.view(np.uint32)[at])
        too_old = rules[TTL] > 0.0 and age > rules[TTL]
        if too_old or decayed(np.float64(row[at + 1]), np.float64(age), rules[LOG_DECAY]) < rules[BELOW]:
            if pinned.size and _is_among(pinned, row.view(np.int64)[0]):
                continue
            if count < slots.size:
                slots[count] = slots_U[i]
            count += 1
    return count


@kernel("void(int64[::1], int64[::1], int64[::1])")
def ids_of(descriptor: Ints, slots_U: Ints, ids_U: Ids) -> None:
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    for i in range(slots_U.size):
        prefetch_record(addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U, i)
        ids_U[i] = id_of(addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U[i])


@kernel("void(int64[::1], int64[::1])")
def _fetch_for_removal(descriptor: Ints, slots_K: Ints) -> None:
    """Asks for what the removal of some rows touches: their records and those of the last rows, then their entries."""
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    shift, width, last = descriptor[SHIFT], descriptor[WIDTH], descriptor[COUNT] - 1
    for i in range(slots_K.size):
        fetch(addresses, shift, width, slots_K[i])
        fetch(addresses, shift, width, last - i)
    for i in range(2 * slots_K.size):
        slot = slots_K[i >> 1] if i & 1 else last - (i >> 1)
        hash_ = hash_of(entries, id_of(addresses, shift, width, slot))
        among = entries if hash_ < old[BOUND] else old
        prefetch(among.ctypes.data + np.int64(home(among, hash_)) * 8)


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1])")
def remove_rows(descriptor: Ints, images: Ints, slots_U: Ints, counts_B: Ints) -> None:
    """Removes rows, in falling order of their slots. The last row takes the place of each. A snapshot keeps both as
    they were (there is room), and the one that moves counts as changed. `counts`: rows of each bucket; empty = not
    counted."""
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    changed = carray(pointer(descriptor[CHANGED]), (descriptor[NUM_CHANGED],), np.uint8)
    shift, width = descriptor[SHIFT], descriptor[WIDTH]
    both = np.empty(2, np.int64)
    for i in range(slots_U.size):
        if i % IDS_AT_ONCE == 0:
            _fetch_for_removal(descriptor, slots_U[i : i + IDS_AT_ONCE])
        slot, last = slots_U[i], descriptor[COUNT] - 1
        if images[SNAPSHOT_ROWS]:
            both[0], both[1] = slot, last
            keep(images, addresses, shift, width, both[:1] if slot == last else both)
        if counts_B.size:
            counts_B[bucket(id_of(addresses, shift, width, slot))] -= 1
        remove(entries, old, addresses, shift, width, slot, last)
        if changed.size and slot != last:
            changed[slot >> 3] |= np.uint8(1 << (slot & 7))
        descriptor[COUNT] = last
    descriptor[REMOVED] += slots_U.size


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int64, int64[:,::1], int64[::1], int64[:,::1], int64[::1])")
def remove_counted(
    descriptor: Ints,
    images: Ints,
    slots_U: Ints,
    capacity: int,
    e: int,
    counts_EB: Descriptors,
    counted_E: Ints,
    over_EB: Descriptors,
    num_over_E: Ints,
) -> None:
    """As `remove_rows`, of slots in any order. Counts the new rows of buckets before, where there is a capacity."""
    counts_B = counts_EB[e]
    if capacity > 0:
        num_over_E[e] = count_rows(descriptor, counted_E[e], counts_B, capacity, over_EB[e], num_over_E[e])
    else:
        counts_B = counts_B[:0]
    remove_rows(descriptor, images, -np.sort(-slots_U), counts_B)
    counted_E[e] = descriptor[COUNT]


@kernel(
    "void(int64[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1], float64[:,::1], int64[:,::1], int64[::1],"
    " int64[:,::1], int64[::1])"
)
def remove_many(
    descriptors: Descriptors,
    images: Descriptors,
    tables_E: Ints,
    ends_E: Ints,
    slots: Ints,
    rules_T: Matrix,
    counts_EB: Descriptors,
    counted_E: Ints,
    over_EB: Descriptors,
    num_over_E: Ints,
) -> None:
    """Removes the rows that `sweep` has found."""
    begin = 0
    for e in range(tables_E.size):
        t = tables_E[e]
        if begin < ends_E[e]:
            descriptors[t, EVICTED] += ends_E[e] - begin
            remove_counted(
                descriptors[t], images[t], slots[begin : ends_E[e]], int(rules_T[t, CAPACITY]), e, counts_EB, counted_E,
                over_EB, num_over_E,
            )  # fmt: skip
        begin = ends_E[e]


@kernel("void(int64[::1], int64[::1], int64[::1])")
def find_rows(descriptor: Ints, ids_U: Ids, slots_U: Ints) -> None:
    """The slots of ids, -1 where there is no row."""
    entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
    old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    find(entries, old, ids_U, addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U)


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], float32[::1])")
def count_pushes(
    tables_S: Ints, starts_S1: Ints, ids_V: Ids, tables_P: Ints, starts_P1: Ints, ids_P: Ids, pushes_V: Rows
) -> None:
    """Adds 1 for each id of sections that a push has; all its sections and ids are among them."""
    s = 0
    for p in range(tables_P.size):
        while tables_S[s] != tables_P[p]:
            s += 1
        at = starts_S1[s]
        for i in range(starts_P1[p], starts_P1[p + 1]):
            while ids_V[at] != ids_P[i]:
                at += 1
            pushes_V[at] += np.float32(1.0)


@kernel("void(int64[::1], int64[::1], uint32[:,::1])")
def write_counters(descriptor: Ints, slots_U: Ints, counters_U2: UInt32s) -> None:
    addresses = carray(pointer(descriptor[ADDRESSES]), (descriptor[NUM_ADDRESSES],), np.int64)
    at = descriptor[COUNTERS]
    for i in range(slots_U.size):
        words = record(addresses, descriptor[SHIFT], descriptor[WIDTH], slots_U[i]).view(np.uint32)
        words[at], words[at + 1] = counters_U2[i, 0], counters_U2[i, 1]


@kernel(
    "int64(int64[:,::1], int64[::1], uint64[:,::1], int64[::1], float64[:,::1], int64[::1], int64[::1], int64[:,::1],"
    " int64[::1], int64[:,::1], int64[::1], int64[::1], int64[::1])"
)
def sweep(
    descriptors: Descriptors,
    tables_E: Ints,
    ranges_E2: Ranges,
    clocks_T: Ints,
    rules_T: Matrix,
    pinned: Ids,
    pinned_E1: Ints,
    counts_EB: Descriptors,
    counted_E: Ints,
    over_EB: Descriptors,
    num_over_E: Ints,
    ends_E: Ints,
    slots: Ints,
) -> int:
    """Of each table whose rows go: counts its new rows by bucket, where it has a capacity, and appends the slots of
    rows in a range of hashes that are too old or score too low. Returns their number; `slots` has as many as fit, and
    those of a table end at `ends_E`. `pinned`: ids that never go, those of table e in [pinned_E1[e], pinned_E1[e + 1])
    and rising."""
    count = 0
    for e in range(tables_E.size):
        t = tables_E[e]
        descriptor, rules = descriptors[t], rules_T[t]
        if rules[CAPACITY] > 0.0:
            num_over_E[e] = count_rows(
                descriptor, counted_E[e], counts_EB[e], int(rules[CAPACITY]), over_EB[e], num_over_E[e]
            )
            counted_E[e] = descriptor[COUNT]
        first, end = ranges_E2[e, 0], ranges_E2[e, 1]
        if first < end and descriptor[COUNT]:
            entries = carray(pointer(descriptor[ENTRIES]), (descriptor[NUM_ENTRIES],), np.uint64)
            old = carray(pointer(descriptor[OLD]), (descriptor[NUM_OLD],), np.uint64)
            kept = pinned[pinned_E1[e] : pinned_E1[e + 1]]
            count = expired(descriptor, entries, old, first, end, clocks_T[t], rules, kept, slots, count)
        ends_E[e] = min(count, slots.size)
    return count
