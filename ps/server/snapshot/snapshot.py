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
from shardkeep.ps.server.pages import SMALL, Pages
from shardkeep.ps.server.table import pre_image_kernels
from shardkeep.ps.server.table.layout import FIRST_WEIGHT, RowLayout
from shardkeep.ps.server.table.pre_images import EVERY_ROW, PreImages
from shardkeep.ps.server.table.records import Records
from shardkeep.ps.server.table.table import Table


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
    """Memory for rows of a part. It returns to the system with this object; an allocator might keep it."""

    def __init__(self) -> None:
        self._flat = Pages(0, np.float32, page_bytes=SMALL).array

    def begin(self, layout: RowLayout, count: int) -> None:
        """Empties it, for about so many rows of one table."""
        self._layout, self._columns = layout, self._apart(0, layout)
        self.of(max(count, self._flat.size // layout.width))

    def of(self, count: int) -> Columns:
        """Room for at least so many rows. What is there stays."""
        if count > (kept := self._columns.ids_K.size):
            before, count = self._columns, max(count, kept + kept // 4)
            if kept or count * self._layout.width > self._flat.size:
                self._flat = Pages(count * self._layout.width, np.float32, page_bytes=SMALL).array
            self._columns = self._apart(count, self._layout)
            self._columns.ids_K[:kept], self._columns.rows_KD[:kept] = before.ids_K, before.rows_KD
            self._columns.slots_KS[:kept] = before.slots_KS
        return self._columns

    def _apart(self, count: int, layout: RowLayout) -> Columns:
        flat, at_rows, at_slots = self._flat[: count * layout.width], FIRST_WEIGHT * count, layout.first_slot * count
        return Columns(
            flat[:at_rows].view(np.int64),
            flat[at_rows:at_slots].reshape(count, layout.row_words),
            flat[at_slots:].reshape(count, layout.slot_words + layout.num_counters),
        )


class Snapshot:
    """All rows, or the rows that changed since a checkpoint, as they were at construction. Each row is taken once.

    No push may run during construction. After it, pushing threads call `Table.make_pre_image_room` under the lock of
    the table's changes. Any thread may call the other methods, which take that lock themselves; no two of them take
    rows of the same hashes.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        locks: Sequence[threading.Lock],
        changed: Sequence[Bytes] | None = None,
        removed: Sequence[Ints] = (),
        *,
        earlier_steps: int = 0,
    ) -> None:
        """`locks`: the lock of each table's changes. `changed`: the bits of the rows in the snapshot, not modified;
        None = all rows. `removed`: ids of rows of each table that were removed since the checkpoint.
        `earlier_steps`: as `Tables` has them."""
        self.tables = tables
        self.removed_T = removed
        self.full = changed is None
        """Whether the snapshot has all rows."""
        self.chosen_T: Sequence[Bytes] = [EVERY_ROW] * len(tables) if changed is None else changed
        """The bits of the rows in the snapshot for each table, or EVERY_ROW."""
        self.rows_T = [table.num_rows for table in tables]
        """Rows of each table at that time."""
        self.counts_T = [table.counts() for table in tables]
        """Counts of each table at that time, by name."""
        self.earlier_steps = earlier_steps
        self._dropped: str | None = None
        self._locks = locks
        for table, chosen in zip(tables, self.chosen_T, strict=True):
            table.pre_images = PreImages(table.descriptor, table.records.width, chosen) if table.num_rows else None
        self._pre_images = [table.pre_images for table in tables]
        self.wanted_T = [0 if images is None else images.num_rows for images in self._pre_images]
        """Rows of each table in the snapshot."""
        self.rows_done = 0
        """Rows that a walk has yielded: its progress."""

    def take(self, t: int, first: int, end: int, room: Room, k: int) -> tuple[int, float]:
        """Copies the rows whose hashes are in [first, end) and that have no pre-image to `room`, from index `k` on.

        Returns the index after them, and the seconds for which it blocked pushes: these continue while rows are copied.
        Rows that they kept meanwhile do not count. Raises CheckpointError after a drop.
        """
        table = self.tables[t]
        with self._locks[t]:
            started = time.perf_counter()
            bits, slots_U = self._held(t).bits, table.index.slots_between(first, end)
            blocks, _addresses = table.records.blocks.copy(), table.records.addresses  # others, if the table grows
            held_s = time.perf_counter() - started
        to = room.of(k + slots_U.size)
        columns = to.ids_K, to.rows_KD, to.slots_KS
        count = pre_image_kernels.copy_rows(blocks, bits, self.rows_T[t], slots_U, *columns, k)
        with self._locks[t]:
            started = time.perf_counter()
            self.check()
            return pre_image_kernels.claim(bits, slots_U[:count], *columns, k), held_s + time.perf_counter() - started

    def pre_images(self, t: int) -> tuple[Records, int]:
        """The pre-images, and how many are final. Raises CheckpointError after a drop."""
        with self._locks[t]:
            images = self._held(t)
            return images.records, images.count

    def take_over(self, t: int) -> tuple[Records, int]:
        """Like `pre_images`, but hands the storage over: later pre-images go to new storage."""
        with self._locks[t]:
            return self._held(t).take_over()

    def pre_image_bytes(self) -> Ints:
        """The approximate bytes of pre-images for each table."""
        return np.array([0 if images is None else images.size_bytes for images in list(self._pre_images)], np.int64)

    def release(self, t: int) -> None:
        """Stops keeping pre-images of a table and frees their memory."""
        with self._locks[t]:
            if (images := self._pre_images[t]) is not None:  # else they may belong to a later snapshot
                images.release()
                self._pre_images[t] = self.tables[t].pre_images = None

    def drop(self, reason: str) -> None:
        """Ends the snapshot and frees its memory. Later `take` calls raise CheckpointError(reason). Idempotent."""
        self._dropped = self._dropped or reason
        for t in range(len(self.tables)):
            self.release(t)

    @property
    def released(self) -> bool:
        """Whether no table keeps pre-images any more."""
        return not any(self._pre_images)

    @property
    def removes(self) -> bool:
        """Whether rows of the checkpoint may have been removed since."""
        return any(table.spec.evict is not None for table in self.tables)

    def check(self) -> None:
        """Raises CheckpointError when the snapshot was dropped."""
        if self._dropped is not None:
            raise CheckpointError(self._dropped)

    def _held(self, t: int) -> PreImages:
        self.check()
        images = self._pre_images[t]
        assert images is not None  # callers ask before the release, and only for tables with rows
        return images
