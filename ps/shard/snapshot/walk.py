"""Walk: yields a snapshot's rows part by part, by placement bucket. Blocks pushes for about 1 ms at a time."""
# K = rows of a part

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.shard.snapshot.snapshot import Columns, Room, Snapshot
from shardkeep.ps.shard.snapshot.spill import Spill
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.index import EVERY_HASH

ROWS_AT_ONCE = 8192
"""Rows that are looked at before pushes may run again: about a millisecond."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one table whose ids fall into buckets [first, end)."""

    table: int
    first: int
    end: int
    columns: Columns


def walk(snapshot: Snapshot, spill: Spill, part_bytes: int) -> Generator[Part, None, None]:
    """Yields all rows of a snapshot in parts of about `part_bytes`. A part is valid until the next one.

    Releases each table after its last row. Raises CheckpointError if the snapshot was dropped, and OSError."""
    for t, rows in enumerate(snapshot.rows_T):
        if rows:
            yield from _walk_table(snapshot, spill, t, part_bytes)
        snapshot.release(t)


def _walk_table(snapshot: Snapshot, spill: Spill, t: int, part_bytes: int) -> Generator[Part, None, None]:
    table, wanted, found = snapshot.tables[t], snapshot.wanted(t), 0
    first_bucket, end_bucket = table.buckets
    step = max(1, wanted and part_bytes * (end_bucket - first_bucket) // (table.layout.row_bytes * wanted))
    room = Room(table)
    for first in range(first_bucket, end_bucket, step) if wanted else ():
        end = min(first + step, end_bucket)
        k = _take(snapshot, spill, t, table.hashes(first, end), room)
        kept, count = snapshot.pre_images(t)
        place = kept.addresses, kept.shift, kept.width
        to = room.of(k + at.count_kept(*place, count, first, end) + spill.count(t, first, end))
        k = at.take_kept(*place, count, first, end, to.ids_K, to.rows_KD, to.slots_KS, k)
        k = spill.take(t, first, end, to, k)
        if k:
            found += k
            yield Part(t, first, end, to.head(k))
    if found != wanted:
        raise CheckpointError(f"table {table.spec.name}: {found} of {wanted} rows were found; this is a defect")


def _take(snapshot: Snapshot, spill: Spill, t: int, hashes: tuple[int, int], room: Room) -> int:
    """Copies the rows of a range of hashes that have no pre-image to `room`. Returns their number."""
    k, (begin, stop) = 0, hashes
    step = max(1, ROWS_AT_ONCE * EVERY_HASH // max(1, snapshot.tables[t].num_rows))
    for first in range(begin, stop, step):
        k, held_s = snapshot.take(t, first, min(first + step, stop), room, k)
        time.sleep(held_s)  # locks are not fair: without a pause the walk would keep pushes out
        spill.relieve(snapshot)
    return k
