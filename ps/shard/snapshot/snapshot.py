"""Snapshot: a server's rows as they were at one instant, while pushes go on changing them. Knows no file and no order.

A push after the snapshot first copies those of its rows that nobody has taken yet. These copies are the pre-images. It
copies single rows, because popular rows lie everywhere: by 64 KB segments a few pushes would copy whole tables. One bit
per row says whether the row is copied or taken.
"""
# U = unique rows, K = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints, UInt32s
from shardkeep.base.errors import CheckpointError
from shardkeep.ps.shard.snapshot.bucket_order import ALL
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.records import Records
from shardkeep.ps.shard.table.table import Table


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows taken apart: ids (K), weights (K, D), optimizer slots (K, S)."""

    ids_K: Ints
    rows_KD: Floats
    slots_KS: Floats

    def head(self, count: int) -> Columns:
        """Views of the first rows."""
        return Columns(self.ids_K[:count], self.rows_KD[:count], self.slots_KS[:count])


class _PreImages:
    """What one table's snapshot owns: the bits and the pre-images."""

    def __init__(self, table: Table, changed: Bytes) -> None:
        """`changed`: bits of the rows that the snapshot is of; the others count as taken."""
        size = -(-table.num_rows // 8)
        self.bits = ~changed[:size] if changed.size else np.zeros(size, dtype=np.uint8)
        self.pre_images = Records(table.records.width)


class Snapshot:
    """The rows of all tables, or those that changed since a checkpoint, as they were when this was made, each to be
    taken once.

    Pushes may come from other threads, but none while it is made. `make_room` is for them, under the lock of the
    table's changes; the other methods are for one thread that takes the rows, and lock for themselves; any thread may
    drop it.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        images_TC: Ints,
        locks: Sequence[threading.Lock],
        changed: Sequence[Bytes] | None = None,
    ) -> None:
        """`images_TC` (int64, tables x COLUMNS): what pushes keep, as their kernels see it. `locks`: of each table's
        changes. `changed`: the bits of each table's rows that count, which nobody changes; None = all rows."""
        self.tables = tables
        self.full = changed is None
        """Whether the snapshot is of all rows."""
        self.chosen_T: Sequence[Bytes] = [ALL] * len(tables) if changed is None else changed
        """Bits of each table's rows that the snapshot is of, or ALL."""
        self.rows_T = [table.num_rows for table in tables]
        self.skipped_rows_T = [table.skipped_rows for table in tables]
        self.over = False
        """Whether nothing is kept any more, of any table."""
        self._dropped: str | None = None
        self._images, self._locks = images_TC, locks
        self._record_bytes_T = np.array([4 * table.records.width for table in tables], dtype=np.int64)
        self._pre_images: list[_PreImages | None] = [
            _PreImages(table, chosen) if table.num_rows else None
            for table, chosen in zip(tables, self.chosen_T, strict=True)
        ]
        for t, images in enumerate(self._pre_images):
            if images is not None:
                self._note_pre_images(t, images)
                images_TC[t, at.BITS], images_TC[t, at.NUM_BITS] = images.bits.ctypes.data, images.bits.size
                images_TC[t, at.ROWS] = self.rows_T[t]

    def make_room(self, tables_S: Ints, rows_S: Ints) -> None:
        """Makes room for the rows of a push."""
        for t, rows in zip(tables_S.tolist(), rows_S.tolist(), strict=True):
            images = self._pre_images[t]
            if images is not None and self._images[t, at.COUNT] + rows > images.pre_images.capacity:
                images.pre_images.reserve(int(self._images[t, at.COUNT]) + rows)
                self._note_pre_images(t, images)

    def take(self, t: int, order_U: UInt32s, to: Columns, k: int) -> tuple[int, float]:
        """Takes those of the rows in slots `order` that are not kept, to place `k` on; returns the place after them,
        and the seconds for which it held up pushes. Raises CheckpointError when the snapshot was dropped."""
        records = self.tables[t].records
        with self._locks[t]:
            started = time.perf_counter()
            bits = self._held(t).bits
            place = records.addresses, records.shift, records.width
            k = at.take(*place, bits, order_U, to.ids_K, to.rows_KD, to.slots_KS, k)
            return k, time.perf_counter() - started

    def pre_images(self, t: int) -> tuple[Records, int]:
        """The pre-images; the first so many do not change any more. Raises CheckpointError after a drop."""
        with self._locks[t]:
            return self._held(t).pre_images, int(self._images[t, at.COUNT])

    def take_over(self, t: int) -> tuple[Records, int]:
        """As `kept`, and further ones go elsewhere."""
        with self._locks[t]:
            images = self._held(t)
            pre_images, count = images.pre_images, int(self._images[t, at.COUNT])
            images.pre_images = Records(pre_images.width)
            self._images[t, at.COUNT] = 0
            self._note_pre_images(t, images)
            return pre_images, count

    def pre_image_bytes(self) -> Ints:
        """Bytes of the pre-images of each table, about."""
        return self._record_bytes_T * self._images[:, at.COUNT]

    def release(self, t: int) -> None:
        """Nothing of a table is kept any more, and its memory is given back."""
        with self._locks[t]:
            if self._pre_images[t] is not None:  # else it may be a later snapshot's
                self._images[t] = 0
                self._pre_images[t] = None

    def drop(self, reason: str) -> None:
        """Ends the snapshot: all memory is given back, and who still takes rows is told why. Idempotent."""
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
        assert images is not None  # taken before its release, and only where there are rows
        return images

    def _note_pre_images(self, t: int, images: _PreImages) -> None:
        addresses = images.pre_images.addresses
        self._images[t, at.ADDRESSES], self._images[t, at.NUM_ADDRESSES] = addresses.ctypes.data, addresses.size
