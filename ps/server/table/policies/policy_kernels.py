"""Kernels of a table's policies: the counters of rows, rows that go, and ids that are counted before they become rows.

A row's counters are the last two words of its record: the clock of its last push (a step, or seconds), uint32, and its
score at that clock, float32. What decides is in the table's `rules` (descriptor_kernels.py).
"""
# U = unique ids, B = buckets, E = tables from which rows go

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import float64, int64, uint64, void

from shardkeep.base.array_kernels import pointer, prefetch
from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.placement_kernels import BUCKET_BITS, bucket
from shardkeep.ps.server.table.descriptor_kernels import FLOATS, INTS, TABLE, TABLES, Descriptor, Descriptors
from shardkeep.ps.server.table.index_kernels import (
    BOUND,
    FACTOR,
    IDS_AT_ONCE,
    LOWEST_KEY,
    entries_of,
    hash_of,
    home,
    old_of,
    remove,
    slots_between,
)
from shardkeep.ps.server.table.layout_kernels import fetch, id_of, prefetch_record, record, start_of
from shardkeep.ps.server.table.pre_image_kernels import keep

_BUCKETS = 1 << BUCKET_BITS
_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_32 = np.uint64(32)
_EVERY_HASH = np.uint64(1 << 32)
_OLDEST = np.uint64(0xFFFFFFFE)


@kernel(float64(float64, float64, float64))
def decayed(score: float, ticks: float, log_decay: float) -> float:
    """A score so many ticks later."""
    return score * np.exp(log_decay * ticks) if log_decay != 0.0 else score


@kernel(void(TABLE, INTS, FLOATS))
def touch(table: Descriptor, slots_U: Ints, pushes_U: Rows) -> None:
    """Counts pushes of rows at the table's clock: `pushes`, or one each if it is empty."""
    at, clock, log_decay = 4 * table.policies.counters, table.policies.rules.clock, table.policies.rules.log_decay
    for i in range(slots_U.size):
        counters = start_of(table.blocks, slots_U[i]) + at
        clocks, scores = carray(pointer(counters), (1,), np.uint32), carray(pointer(counters + 4), (1,), np.float32)
        score = decayed(np.float64(scores[0]), np.float64(clock - np.int64(clocks[0])), log_decay)
        scores[0] = np.float32(score + (pushes_U[i] if pushes_U.size else 1.0))
        clocks[0] = np.uint32(clock)


@kernel(void(TABLE, int64))
def reset_counters(table: Descriptor, first: int) -> None:
    """Zeros the counters of rows in slots from `first` on, which are new."""
    at = table.policies.counters
    for slot in range(first, table.count):
        row = record(table.blocks, slot)
        row[at] = row[at + 1] = np.float32(0.0)


@kernel(INTS(TABLE))
def bucket_rows(table: Descriptor) -> Ints:
    """The rows of each bucket, of a table with a capacity."""
    rows_B: Ints = carray(pointer(table.policies.rules.buckets.rows), (_BUCKETS,), np.int64)
    return rows_B


@kernel(void(TABLE))
def count_rows(table: Descriptor) -> None:
    """Counts the rows that are not counted yet in their buckets, if the table has a capacity, and appends the buckets
    that begin to exceed it to the full ones."""
    rules = table.policies.rules
    if not rules.buckets.capacity:
        return
    rows_B, full_B = bucket_rows(table), carray(pointer(rules.buckets.full), (_BUCKETS,), np.int64)
    for slot in range(rules.buckets.counted, table.count):
        b = bucket(id_of(table.blocks, slot))
        rows_B[b] += 1
        if rows_B[b] == rules.buckets.capacity + 1:
            full_B[rules.buckets.num_full] = b
            rules.buckets.num_full += 1
    rules.buckets.counted = table.count


@kernel(int64(TABLE, INTS, int64, INTS))
def lowest(table: Descriptor, buckets_O: Ints, cut: int, slots: Ints) -> int:
    """The slots of the lowest rows of each bucket with more rows than the capacity, down to `cut` below it, and their
    number. Rows of equal rank go by their placement keys, which are the same on any number of servers."""
    blocks, at, rules, rows_B = table.blocks, table.policies.counters, table.policies.rules, bucket_rows(table)
    entries, capacity = entries_of(table), rules.buckets.capacity
    first_bucket, factor = entries[LOWEST_KEY] >> _BUCKET_SHIFT, entries[FACTOR]
    count = 0
    score_word = np.empty(1, np.float32)
    score_bits = score_word.view(np.uint32)
    for o in range(buckets_O.size):
        begin = (np.uint64(buckets_O[o]) - first_bucket) * factor
        slots_U = np.empty(rows_B[buckets_O[o]], np.int64)
        num_rows = min(slots_between(table, begin, begin + factor, slots_U), slots_U.size)
        if num_rows <= capacity:
            continue
        excess = num_rows - capacity + cut
        ranks_U, keys_U = np.empty(num_rows, np.uint64), np.empty(num_rows, np.uint64)
        for i in range(num_rows):
            prefetch_record(blocks, slots_U, i)
            row = record(blocks, slots_U[i])
            age = rules.clock - np.int64(row.view(np.uint32)[at])
            score_word[0] = np.float32(decayed(np.float64(row[at + 1]), np.float64(age), rules.log_decay))
            young = _OLDEST - np.uint64(age)
            score = np.uint64(score_bits[0])
            ranks_U[i] = score << _32 | young if rules.by_score else young << _32 | score
            keys_U[i] = mix(np.uint64(carray(pointer(row.ctypes.data), (1,), np.int64)[0]))
        highest = np.sort(ranks_U)[excess - 1]
        ties = np.sort(keys_U[ranks_U == highest])
        last_key = ties[excess - 1 - (ranks_U < highest).sum()]
        for i in range(num_rows):
            if ranks_U[i] < highest or (ranks_U[i] == highest and keys_U[i] <= last_key):
                slots[count] = slots_U[i]
                count += 1
    return count


@kernel(int64(TABLE, uint64, uint64, INTS, int64))
def expired(table: Descriptor, first: np.uint64, end: np.uint64, slots: Ints, count: int) -> int:
    """Appends the slots of rows with hashes [first, end) that are too old; returns their number."""
    blocks, at, rules = table.blocks, table.policies.counters, table.policies.rules
    slots_U = np.empty(0, np.int64)
    slots_U = np.empty(slots_between(table, first, end, slots_U), np.int64)
    slots_between(table, first, end, slots_U)
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        if rules.clock - np.int64(record(blocks, slots_U[i]).view(np.uint32)[at]) > rules.ttl:
            if count < slots.size:
                slots[count] = slots_U[i]
            count += 1
    return count


@kernel(uint64(TABLE, int64))
def hashes_of_share(table: Descriptor, share: int) -> np.uint64:
    """Where a share of the buckets begins in the order of hashes: the next bucket that is the server's."""
    entries = entries_of(table)
    first_bucket = np.int64(entries[LOWEST_KEY] >> _BUCKET_SHIFT)
    begin = share * _BUCKETS // table.policies.rules.period - first_bucket
    return min(np.uint64(begin if begin > 0 else 0) * entries[FACTOR], _EVERY_HASH)


@kernel(void(TABLES, INTS, INTS))
def ids_of(tables: Descriptors, slots_U: Ints, ids_U: Ids) -> None:
    """The ids of the rows in slots of the first table."""
    table: Descriptor = tables[0]
    for i in range(slots_U.size):
        prefetch_record(table.blocks, slots_U, i)
        ids_U[i] = id_of(table.blocks, slots_U[i])


@kernel(void(TABLE, INTS))
def _fetch_for_removal(table: Descriptor, slots_K: Ints) -> None:
    """Asks for what the removal of some rows touches: their records and those of the last rows, then their entries."""
    entries, old, blocks, last = entries_of(table), old_of(table), table.blocks, table.count - 1
    for i in range(slots_K.size):
        fetch(blocks, slots_K[i])
        fetch(blocks, last - i)
    for i in range(2 * slots_K.size):
        slot = slots_K[i >> 1] if i & 1 else last - (i >> 1)
        hash_ = hash_of(entries, id_of(blocks, slot))
        among = entries if hash_ < old[BOUND] else old
        prefetch(among.ctypes.data + np.int64(home(among, hash_)) * 8)


@kernel(void(TABLE, INTS))
def remove_rows(table: Descriptor, slots_U: Ints) -> None:
    """Removes rows, the last one first. The table's last row takes the place of each. A snapshot keeps both as they
    were (there is room), and the one that moves counts as changed. All rows are counted in their buckets, or none."""
    slots_U = -np.sort(-slots_U)
    rules, rows_B = table.policies.rules, bucket_rows(table)
    changed = carray(pointer(table.changed), ((table.count + 7) // 8,), np.uint8)
    both = np.empty(2, np.int64)
    for i in range(slots_U.size):
        if i % IDS_AT_ONCE == 0:
            _fetch_for_removal(table, slots_U[i : i + IDS_AT_ONCE])
        slot, last = slots_U[i], table.count - 1
        if table.images.rows:
            both[0], both[1] = slot, last
            keep(table, both[:1] if slot == last else both)
        if rules.buckets.counted:
            rows_B[bucket(id_of(table.blocks, slot))] -= 1
            rules.buckets.counted = last
        remove(table, slot)
        if table.changed and slot != last:
            changed[slot >> 3] |= np.uint8(1 << (slot & 7))
    table.policies.removed += slots_U.size


@kernel(void(TABLES, INTS))
def remove_from(tables: Descriptors, slots_U: Ints) -> None:
    """Removes rows of the first table."""
    remove_rows(tables[0], slots_U)


@kernel(int64(TABLES, INTS, INTS, INTS))
def sweep(tables: Descriptors, tables_E: Ints, ends_E: Ints, slots: Ints) -> int:
    """Of each table whose rows go: counts its new rows by bucket, and appends the slots of rows that are too old, in
    this step's share of the buckets. Returns their number; `slots` has as many as fit, and those of a table end at
    `ends_E`."""
    count = 0
    for e in range(tables_E.size):
        table: Descriptor = tables[tables_E[e]]
        count_rows(table)
        if table.policies.rules.period and table.count:
            share = table.step % table.policies.rules.period
            first, end = hashes_of_share(table, share), hashes_of_share(table, share + 1)
            if first < end:
                count = expired(table, first, end, slots, count)
        ends_E[e] = min(count, slots.size)
    return count
