"""Walk: yields a snapshot's rows part by part, by placement bucket. Blocks pushes for about 1 ms at a time."""
# N = rows of a table, K = rows of a part, D = embedding dim, S = optimizer slots of a row, B = buckets

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.snapshot.bucket_order import bucket_order
from shardkeep.ps.shard.snapshot.snapshot import Columns, Snapshot
from shardkeep.ps.shard.snapshot.spill import Spill
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.pages import SMALL, Pages
from shardkeep.ps.shard.table.table import Table

ROWS_AT_ONCE = 8192
"""Rows copied before pushes may run again: about a millisecond."""


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
    def between() -> None:
        snapshot.check()
        spill.relieve(snapshot)

    table = snapshot.tables[t]
    order, starts_B1 = bucket_order(table.records, snapshot.rows_T[t], between, chosen=snapshot.chosen_T[t])
    if not order.array.size:
        return
    ranges = ranges_of(starts_B1, max(1, part_bytes // table.layout.row_bytes))
    room = _Room(table, max(int(starts_B1[end] - starts_B1[first]) for first, end in ranges))
    for first, end in ranges:
        order_K = order.array[starts_B1[first] : starts_B1[end]]
        columns = room.columns.head(order_K.size)
        k = 0
        for begin in range(0, order_K.size, ROWS_AT_ONCE):
            k, held_s = snapshot.take(t, order_K[begin : begin + ROWS_AT_ONCE], columns, k)
            time.sleep(held_s)  # locks are not fair: without a pause the walk would keep pushes out
            spill.relieve(snapshot)
        kept, count = snapshot.pre_images(t)
        place = kept.addresses, kept.shift, kept.width
        k = at.take_kept(*place, count, first, end, columns.ids_K, columns.rows_KD, columns.slots_KS, k)
        k = spill.take(t, first, end, columns, k)
        if k != order_K.size:
            raise CheckpointError(f"table {table.spec.name}: {k} of {order_K.size} rows were found; this is a defect")
        yield Part(t, first, end, columns)


def ranges_of(starts_B1: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Ranges [first, end) of buckets with at most `most` rows each, or one larger bucket. Omits empty ranges."""
    found, first = [], 0
    while first < BUCKETS:
        end = max(first + 1, int(np.searchsorted(starts_B1, starts_B1[first] + most, side="right")) - 1)
        if starts_B1[end] > starts_B1[first]:
            found.append((first, end))
        first = end
    return found


class _Room:
    """Memory for a part's rows. It returns to the system with this object; an allocator might keep it."""

    def __init__(self, table: Table, count: int) -> None:
        words = count * table.layout.used
        flat = Pages(words, np.float32, page_bytes=SMALL).array
        at_rows, at_slots = table.layout.first_weight * count, table.layout.first_slot * count
        self.columns = Columns(
            flat[:at_rows].view(np.int64),
            flat[at_rows:at_slots].reshape(count, -1),
            flat[at_slots:].reshape(count, table.layout.num_slots),
        )
