"""Walk: yields a snapshot's rows part by part, by placement bucket. Blocks pushes for about 0.2 ms at a time.

Spill moves pre-images from memory to an unnamed temporary file, sorted by bucket, until the walk reaches their bucket.
"""
# U = rows written at once, K = rows of a part, W = words of a record, B = buckets that have rows

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CheckpointError
from shardkeep.base.machine.in_order import in_order
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.pages import SMALL, Pages
from shardkeep.ps.server.snapshot.snapshot import Columns, Room, Snapshot
from shardkeep.ps.server.table import pre_image_kernels
from shardkeep.ps.server.table.index import EVERY_HASH
from shardkeep.ps.server.table.records import Records

LIMIT_BYTES = 24 << 20
"""Pre-images above this size are moved to the file."""
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class _Run:
    """Records of one table in the file, sorted by bucket, with the start of each bucket that has any."""

    begin: int
    width: int
    buckets_B: npt.NDArray[np.uint16]
    starts_B1: npt.NDArray[np.uint32]

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """The number of records of buckets [first, end), and the number of records before them."""
        at_first, at_end = np.searchsorted(self.buckets_B, (first, end))
        return int(self.starts_B1[at_end]) - int(self.starts_B1[at_first]), int(self.starts_B1[at_first])


class Spill:
    """Stores pre-images until the walk over the snapshot reaches their bucket."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._runs: dict[int, list[_Run]] = {}  # by table
        self._size = 0

    def close(self) -> None:
        self._file.close()

    def relieve(self, snapshot: Snapshot) -> None:
        """Moves pre-images of the largest tables to the file if the total exceeds LIMIT_BYTES.

        Raises OSError or CheckpointError."""
        with self._lock:
            bytes_T = snapshot.pre_image_bytes()
            if bytes_T.sum() <= LIMIT_BYTES:
                return
            while bytes_T.sum() > LIMIT_BYTES // 2:
                t = int(bytes_T.argmax())
                self._append(t, *snapshot.take_over(t))
                bytes_T[t] = 0

    def take(self, snapshot: Snapshot, t: int, first: int, end: int, room: Room, k: int) -> int:
        """Copies a table's pre-images of buckets [first, end), in memory or not, to `room`, from index `k` on.

        Returns the index after them. Raises OSError or CheckpointError."""
        with self._lock:  # none moves to the file meanwhile
            kept, count = snapshot.pre_images(t)
            found = pre_image_kernels.count_kept(kept.blocks, count, first, end)
            to = room.of(k + found + sum(run.range_of(first, end)[0] for run in self._runs.get(t, [])))
            k = pre_image_kernels.take_kept(kept.blocks, count, first, end, to.ids_K, to.rows_KD, to.slots_KS, k)
            return self._read(t, first, end, to, k)

    def _read(self, t: int, first: int, end: int, to: Columns, k: int) -> int:
        for run in self._runs.get(t, []):
            count, before = run.range_of(first, end)
            if count:
                self._file.seek(run.begin + 4 * run.width * before)
                records_UW = np.empty((count, run.width), dtype=np.float32)
                if self._file.readinto(records_UW.data) != records_UW.nbytes:
                    raise OSError("a temporary file of a snapshot lost its end")
                pre_image_kernels.take_all(records_UW, to.ids_K, to.rows_KD, to.slots_KS, k)
                k += count
        return k

    def _append(self, t: int, kept: Records, count: int) -> None:
        order, starts_B1 = bucket_order(kept, count)
        self._file.seek(self._size)
        for begin in range(0, count, _ROWS_AT_ONCE):
            part_U = order.array[begin : begin + _ROWS_AT_ONCE]
            records_UW = np.empty((part_U.size, kept.width), dtype=np.float32)
            pre_image_kernels.copy_records(kept.blocks, part_U, records_UW)
            self._file.write(records_UW.data)
        buckets_B = np.flatnonzero(np.diff(starts_B1))
        starts_B1 = starts_B1[np.append(buckets_B, BUCKETS)]
        run = _Run(self._size, kept.width, buckets_B.astype(np.uint16), starts_B1.astype(np.uint32))
        self._runs.setdefault(t, []).append(run)
        self._size += 4 * kept.width * count


def bucket_order(records: Records, count: int) -> tuple[Pages[np.uint32], npt.NDArray[np.int64]]:
    """The first `count` slots sorted by bucket (4 bytes each), and the start of each bucket in them (BUCKETS + 1)."""
    starts_B1 = np.zeros(BUCKETS + 1, dtype=np.int64)
    pre_image_kernels.count_buckets(records.blocks, count, starts_B1[1:])
    np.cumsum(starts_B1, out=starts_B1)
    order_N = Pages(count, np.uint32, page_bytes=SMALL)
    pre_image_kernels.sort_slots(records.blocks, starts_B1[:-1].copy(), order_N.array)
    return order_N, starts_B1


ROWS_AT_ONCE = 16384
"""Rows that are looked at before pushes may run again: about a fifth of a millisecond."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Rows of one table whose ids fall into buckets [first, end), and the room that they are in."""

    table: int
    first: int
    end: int
    columns: Columns
    room: Room


def walk(
    snapshot: Snapshot, spill: Spill, part_bytes: int, pool: Executor, threads: int, rooms: list[Room]
) -> Generator[SnapshotPart, None, None]:
    """Yields all rows of a snapshot in parts of about `part_bytes`, in the same order for any number of threads.

    Releases each table after its last row. Raises CheckpointError if the snapshot was dropped, and OSError. `rooms`:
    those that the caller needs no more; they are used again."""

    def taken(part: tuple[int, int, int, Room]) -> SnapshotPart:
        t, first, end, room = part
        hashes = snapshot.tables[t].index.hashes(first, end)
        room.begin(snapshot.tables[t].layout, snapshot.wanted_T[t] * (hashes[1] - hashes[0]) * 17 // 16 // EVERY_HASH)
        k = spill.take(snapshot, t, first, end, room, _take(snapshot, spill, t, hashes, room))
        return SnapshotPart(t, first, end, room.of(k).head(k), room)

    done = 0
    roomy = ((*each, rooms.pop() if rooms else Room()) for each in _ranges(snapshot, part_bytes))
    for part in in_order(pool, threads, taken, roomy):
        while done < part.table:
            snapshot.release(done)
            done += 1
        snapshot.rows_done += part.columns.ids_K.size
        yield part
    if snapshot.rows_done != (expected := sum(snapshot.wanted_T)):
        raise CheckpointError(f"{snapshot.rows_done} of {expected} rows were found; this is a defect")
    for t in range(done, len(snapshot.tables)):
        snapshot.release(t)


def _ranges(snapshot: Snapshot, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Tables with ranges of buckets of about `part_bytes`."""
    for t, (table, expected) in enumerate(zip(snapshot.tables, snapshot.wanted_T, strict=True)):
        first_bucket, end_bucket = table.index.buckets
        step = max(1, expected and part_bytes * (end_bucket - first_bucket) // (table.layout.row_bytes * expected))
        for first in range(first_bucket, end_bucket, step) if expected else ():
            yield t, first, min(first + step, end_bucket)


def _take(snapshot: Snapshot, spill: Spill, t: int, hashes: tuple[int, int], room: Room) -> int:
    """Copies the rows of a range of hashes that have no pre-image to `room`. Returns their number."""
    k, (begin, stop) = 0, hashes
    step = max(1, ROWS_AT_ONCE * EVERY_HASH // max(1, snapshot.tables[t].num_rows))
    for first in range(begin, stop, step):
        k, held_s = snapshot.take(t, first, min(first + step, stop), room, k)
        time.sleep(held_s)  # locks are not fair: without a pause the walk would keep pushes out
        spill.relieve(snapshot)
    return k
