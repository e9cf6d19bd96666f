"""Mark: a server's rows as they were at one instant, while pushes go on changing them. Knows no file and no order.

A push that comes after the mark first copies those of its rows that nobody has taken yet: row by row, for popular rows
lie everywhere, and by 64 KB segments a few pushes would copy whole tables. A bit a row says which are copied or taken.
"""
# U = unique rows, K = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.shard.snapshot.bucket_order import ALL
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.records import Records
from shardkeep.ps.shard.table.table import Bits, Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows taken apart: ids (K), weights (K, D), optimizer slots (K, S)."""

    ids_K: Ints
    rows_KD: Floats
    slots_KS: Floats

    def head(self, count: int) -> Columns:
        """Views of the first rows."""
        return Columns(self.ids_K[:count], self.rows_KD[:count], self.slots_KS[:count])


class _Marked:
    """What one table's mark owns: the bits and the kept rows."""

    def __init__(self, table: Table, changed: Bits) -> None:
        """`changed`: bits of the rows that the mark is of; the others count as taken."""
        size = -(-table.num_rows // 8)
        self.bits = ~changed[:size] if changed.size else np.zeros(size, dtype=np.uint8)
        self.kept = Records(table.records.width)


class Mark:
    """The rows of all tables, or those that changed since a checkpoint, as they were when this was made, each to be
    taken once.

    Pushes may come from other threads, but none while it is made. `make_room` is for them, under the lock of the
    table's changes; the other methods are for one thread that takes the rows, and lock for themselves; any thread may
    drop it.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        marks: Ints,
        locks: Sequence[threading.Lock],
        changed: Sequence[Bits] | None = None,
    ) -> None:
        """`marks` (int64, tables x COLUMNS): what the kernels of a push look at. `locks`: of each table's
        changes. `changed`: the bits of each table's rows that count, which nobody changes; None = all rows."""
        self.tables = tables
        self.full = changed is None
        """Whether the mark is of all rows."""
        self.chosen_T: Sequence[Bits] = [ALL] * len(tables) if changed is None else changed
        """Bits of each table's rows that the mark is of, or ALL."""
        self.rows_T = [table.num_rows for table in tables]
        self.skipped_rows_T = [table.skipped_rows for table in tables]
        self.over = False
        """Whether nothing is kept any more, of any table."""
        self._dropped: str | None = None
        self._marks, self._locks = marks, locks
        self._record_bytes_T = np.array([4 * table.records.width for table in tables], dtype=np.int64)
        self._marked: list[_Marked | None] = [
            _Marked(table, chosen) if table.num_rows else None
            for table, chosen in zip(tables, self.chosen_T, strict=True)
        ]
        for t, marked in enumerate(self._marked):
            if marked is not None:
                self._note_kept(t, marked)
                marks[t, at.BITS], marks[t, at.NUM_BITS] = marked.bits.ctypes.data, marked.bits.size
                marks[t, at.ROWS] = self.rows_T[t]

    def make_room(self, tables_S: Ints, rows_S: Ints) -> None:
        """Makes room for the rows of a push."""
        for t, rows in zip(tables_S.tolist(), rows_S.tolist(), strict=True):
            marked = self._marked[t]
            if marked is not None and self._marks[t, at.COUNT] + rows > marked.kept.capacity:
                marked.kept.reserve(int(self._marks[t, at.COUNT]) + rows)
                self._note_kept(t, marked)

    def take(self, t: int, order_U: Order, to: Columns, k: int) -> tuple[int, float]:
        """Takes those of the rows in slots `order` that are not kept, to place `k` on; returns the place after them,
        and the seconds for which it held up pushes. Raises CheckpointError when the mark was dropped."""
        records = self.tables[t].records
        with self._locks[t]:
            started = time.perf_counter()
            bits = self._held(t).bits
            place = records.addresses, records.shift, records.width
            k = at.take(*place, bits, order_U, to.ids_K, to.rows_KD, to.slots_KS, k)
            return k, time.perf_counter() - started

    def kept(self, t: int) -> tuple[Records, int]:
        """The kept rows; the first so many do not change any more. Raises CheckpointError when the mark was dropped."""
        with self._locks[t]:
            return self._held(t).kept, int(self._marks[t, at.COUNT])

    def take_over(self, t: int) -> tuple[Records, int]:
        """As `kept`, and further ones go elsewhere."""
        with self._locks[t]:
            marked = self._held(t)
            kept, count = marked.kept, int(self._marks[t, at.COUNT])
            marked.kept = Records(kept.width)
            self._marks[t, at.COUNT] = 0
            self._note_kept(t, marked)
            return kept, count

    def kept_bytes(self) -> Ints:
        """Bytes of the kept rows of each table, about."""
        return self._record_bytes_T * self._marks[:, at.COUNT]

    def release(self, t: int) -> None:
        """Nothing of a table is kept any more, and its memory is given back."""
        with self._locks[t]:
            if self._marked[t] is not None:  # else it may be a later mark's
                self._marks[t] = 0
                self._marked[t] = None

    def drop(self, reason: str) -> None:
        """Ends the mark: all memory is given back, and who still takes rows is told why. Idempotent."""
        self._dropped = self._dropped or reason
        for t in range(len(self.tables)):
            self.release(t)
        self.over = True

    @property
    def released(self) -> bool:
        """Whether the memory of every table has been given back."""
        return not any(self._marked)

    def check(self) -> None:
        """Raises CheckpointError when the mark was dropped."""
        if self._dropped is not None:
            raise CheckpointError(self._dropped)

    def _held(self, t: int) -> _Marked:
        self.check()
        marked = self._marked[t]
        assert marked is not None  # taken before its release, and only where there are rows
        return marked

    def _note_kept(self, t: int, marked: _Marked) -> None:
        addresses = marked.kept.addresses
        self._marks[t, at.ADDRESSES], self._marks[t, at.NUM_ADDRESSES] = addresses.ctypes.data, addresses.size
