"""Snapshot: a server's rows as they were at one instant, while pushes keep changing them. Knows no file and no order.

Before a push changes a row that has not been taken, it copies the row: the pre-image. It copies single rows, because
popular rows are scattered: with 64 KB segments a few pushes would copy whole tables. One bit per row says whether the
row is copied or taken.
"""
# U = unique rows, K = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.base.errors import CheckpointError
from shardkeep.ps.shard.snapshot.bucket_order import ALL
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.pages import SMALL, Pages
from shardkeep.ps.shard.table.records import Records
from shardkeep.ps.shard.table.table import Table

_ONES = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
"""Bits that are set in each byte."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows as separate arrays: ids (K), and the words of records: of weights (K, D), of optimizer slots and counters
    (K, S)."""

    ids_K: Ints
    rows_KD: Floats
    slots_KS: Floats

    def head(self, count: int) -> Columns:
        """Views of the first rows."""
        return Columns(self.ids_K[:count], self.rows_KD[:count], self.slots_KS[:count])


class Room:
    """Memory for rows of a table. It returns to the system with this object; an allocator might keep it."""

    def __init__(self, table: Table) -> None:
        self._layout = table.layout
        self._count, self._columns = -1, self._made(0)

    def of(self, count: int) -> Columns:
        """Room for at least so many rows. What is there stays."""
        if count > self._count:
            before, self._columns = self._columns, self._made(max(count, self._count + self._count // 4))
            kept = before.ids_K.size
            self._columns.ids_K[:kept], self._columns.rows_KD[:kept] = before.ids_K, before.rows_KD
            self._columns.slots_KS[:kept] = before.slots_KS
        return self._columns

    def _made(self, count: int) -> Columns:
        flat = Pages(count * self._layout.used, np.float32, page_bytes=SMALL).array
        at_rows, at_slots = self._layout.first_weight * count, self._layout.first_slot * count
        self._count = count
        return Columns(
            flat[:at_rows].view(np.int64),
            flat[at_rows:at_slots].reshape(count, self._layout.row_words),
            flat[at_slots:].reshape(count, self._layout.slot_words + self._layout.num_counters),
        )


class _PreImages:
    """The bits and pre-images of one table."""

    def __init__(self, table: Table, changed: Bytes) -> None:
        """`changed`: bits of the rows in the snapshot; all other rows count as taken."""
        size = -(-table.num_rows // 8)
        self.bits = ~changed[:size] if changed.size else np.zeros(size, dtype=np.uint8)
        if table.num_rows % 8:
            self.bits[-1] |= 0xFF << table.num_rows % 8 & 0xFF  # there are no such rows
        self.wanted = 8 * size - int(_ONES[self.bits].sum(dtype=np.int64))
        """Rows in the snapshot."""
        self.pre_images = Records(table.records.width)


class Snapshot:
    """All rows, or the rows that changed since a checkpoint, as they were at construction. Each row is taken once.

    No push may run during construction. After it, pushing threads call `make_room` under the lock of the table's
    changes. One thread calls the other methods, which take that lock themselves. Any thread may call `drop`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        images_TC: Ints,
        locks: Sequence[threading.Lock],
        changed: Sequence[Bytes] | None = None,
        removed: Sequence[Ints] = (),
    ) -> None:
        """`images_TC` (int64, tables x COLUMNS): the arguments of the kernels that copy pre-images. `locks`: the lock
        of each table's changes. `changed`: the bits of the rows in the snapshot, not modified; None = all rows.
        `removed`: ids of rows of each table that were removed since the checkpoint."""
        self.tables = tables
        self.removed_T = removed
        self.full = changed is None
        """Whether the snapshot has all rows."""
        self.removes = any(table.spec.evict is not None for table in tables)
        """Whether rows of the checkpoint may have been removed since."""
        self.chosen_T: Sequence[Bytes] = [ALL] * len(tables) if changed is None else changed
        """The bits of the rows in the snapshot for each table, or ALL."""
        self.rows_T = [table.num_rows for table in tables]
        """Rows of each table at that time."""
        self.counts_T = [table.counts() for table in tables]
        """Counts of each table at that time, by name."""
        self.earlier_steps = 0
        """`Tables.earlier_steps`."""
        self.over = False
        """Whether no table keeps pre-images any more."""
        self._dropped: str | None = None
        self._images, self._locks = images_TC, locks
        self._record_bytes_T = np.array([4 * table.records.width for table in tables], dtype=np.int64)
        self._pre_images: list[_PreImages | None] = [
            _PreImages(table, chosen) if table.num_rows else None
            for table, chosen in zip(tables, self.chosen_T, strict=True)
        ]
        self._wanted_T = [0 if images is None else images.wanted for images in self._pre_images]
        for t, images in enumerate(self._pre_images):
            if images is not None:
                self._note_pre_images(t, images)
                images_TC[t, at.BITS], images_TC[t, at.NUM_BITS] = images.bits.ctypes.data, images.bits.size
                images_TC[t, at.ROWS] = self.rows_T[t]

    def wanted(self, t: int) -> int:
        """Rows of a table in the snapshot."""
        return self._wanted_T[t]

    def make_room(self, tables_S: Ints, rows_S: Ints) -> None:
        """Makes room for the rows of a push."""
        for t, rows in zip(tables_S.tolist(), rows_S.tolist(), strict=True):
            images = self._pre_images[t]
            if images is not None and self._images[t, at.COUNT] + rows > images.pre_images.capacity:
                images.pre_images.reserve(int(self._images[t, at.COUNT]) + rows)
                self._note_pre_images(t, images)

    def take(self, t: int, first: int, end: int, room: Room, k: int) -> tuple[int, float]:
        """Copies the rows whose hashes are in [first, end) and that have no pre-image to `room`, from index `k` on.

        Returns the index after them, and the seconds for which it blocked pushes. Raises CheckpointError after a drop.
        """
        table = self.tables[t]
        with self._locks[t]:
            started = time.perf_counter()
            bits, slots_U = self._held(t).bits, table.slots_between(first, end)
            to = room.of(k + slots_U.size)
            place = table.records.addresses, table.records.shift, table.records.width
            k = at.take(*place, bits, self.rows_T[t], slots_U, to.ids_K, to.rows_KD, to.slots_KS, k)
            return k, time.perf_counter() - started

    def pre_images(self, t: int) -> tuple[Records, int]:
        """The pre-images, and how many are final. Raises CheckpointError after a drop."""
        with self._locks[t]:
            return self._held(t).pre_images, int(self._images[t, at.COUNT])

    def take_over(self, t: int) -> tuple[Records, int]:
        """Like `pre_images`, but hands the storage over: later pre-images go to new storage."""
        with self._locks[t]:
            images = self._held(t)
            pre_images, count = images.pre_images, int(self._images[t, at.COUNT])
            images.pre_images = Records(pre_images.width)
            self._images[t, at.COUNT] = 0
            self._note_pre_images(t, images)
            return pre_images, count

    def pre_image_bytes(self) -> Ints:
        """The approximate bytes of pre-images for each table."""
        return self._record_bytes_T * self._images[:, at.COUNT]

    def release(self, t: int) -> None:
        """Stops keeping pre-images of a table and frees their memory."""
        with self._locks[t]:
            if self._pre_images[t] is not None:  # else the columns may belong to a later snapshot
                self._images[t] = 0
                self._pre_images[t] = None

    def drop(self, reason: str) -> None:
        """Ends the snapshot and frees its memory. Later `take` calls raise CheckpointError(reason). Idempotent."""
        self._dropped = self._dropped or reason
        for t in range(len(self.tables)):
            self.release(t)
        self.over = True

    @property
    def released(self) -> bool:
        """Whether the memory of every table has been given back."""
        return not any(self._pre_images)

    def check(self) -> None:
        """Raises CheckpointError when the snapshot was dropped."""
        if self._dropped is not None:
            raise CheckpointError(self._dropped)

    def _held(self, t: int) -> _PreImages:
        self.check()
        images = self._pre_images[t]
        assert images is not None  # callers ask before the release, and only for tables with rows
        return images

    def _note_pre_images(self, t: int, images: _PreImages) -> None:
        addresses = images.pre_images.addresses
        self._images[t, at.ADDRESSES], self._images[t, at.NUM_ADDRESSES] = addresses.ctypes.data, addresses.size
