"""ChangedRows: the rows of a server's tables that changed since the last complete checkpoint, for an increment.

One bit per row, set by the kernel of every update (table_kernels.py), and the ids of rows that were removed. A row that
moved to another slot counts as changed. Knows no file: a checkpoint is an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes, Ids
from shardkeep.ps.server.table.records import Records


class ChangedBits:
    """A bit for each row of one table, which kernels set through the table's descriptor. Not thread safe."""

    def __init__(self, descriptor: Any, records: Records) -> None:
        self._descriptor = descriptor
        self._records = records
        self._bits = np.zeros(0, dtype=np.uint8)  # without room for any: changes are not noted
        self._removed: list[Ids] = []

    def __bool__(self) -> bool:
        """Whether a bit is set for each row that changes."""
        return bool(self._bits.size)

    def start(self) -> Bytes:
        """Starts to record which rows change, with no bit set.

        Returns the bits until now, 8 slots a byte, which the caller owns (empty if changes were not recorded)."""
        before = self._bits
        self._set(np.zeros(max(1, self._wanted()), dtype=np.uint8))
        return before

    def add(self, bits: Bytes) -> None:
        """Sets bits that an earlier `start` gave."""
        self._bits[: bits.size] |= bits

    def note_removed(self, ids_U: Ids) -> None:
        """Records the ids of rows that are removed, if changes are recorded. Keeps the array."""
        if self:
            self._removed.append(ids_U)

    def take_removed(self) -> Ids:
        """The ids of the rows that were removed since the last call; some may be there again."""
        removed, self._removed = self._removed, []
        return np.concatenate([np.empty(0, dtype=np.int64), *removed])

    def make_room(self) -> None:
        """Makes room for all records that there may be."""
        if self._bits.size and self._bits.size < self._wanted():
            more = np.zeros(max(self._wanted(), 2 * self._bits.size), dtype=np.uint8)
            more[: self._bits.size] = self._bits
            self._set(more)

    def _wanted(self) -> int:
        return -(-self._records.capacity // 8)

    def _set(self, bits: Bytes) -> None:
        self._bits = bits
        self._descriptor["changed"] = bits.ctypes.data


class ChangedRows:
    """The bits of all tables. At a snapshot they are handed over to it and start at zero. If that checkpoint has
    not become complete by the next snapshot, they come back then. Not thread safe."""

    def __init__(self, tables: Sequence[ChangedBits]) -> None:
        self._tables = tables
        self._base = ""
        self._handed: list[Bytes] | None = None
        self.removed: list[Ids] = [table.take_removed() for table in tables]
        """Ids of the rows of each table that were removed before the last `hand_over`."""

    def follow(self, base: str) -> None:
        """Starts to record changes. `base`: the checkpoint that the tables hold now; "" = none.

        No push may run during the call."""
        for table in self._tables:
            table.start()
            table.take_removed()
        self._base, self._handed = base, None

    def hand_over(self, base: str) -> list[Bytes] | None:
        """The bits of the rows that changed since checkpoint `base`, for a snapshot.

        None = not known: the snapshot must hold all rows. The bits start again at zero. If `complete` follows, they are
        the changes since the snapshot's checkpoint. No push may run during the call."""
        for table, bits, removed in zip(self._tables, self._handed or [], self.removed, strict=False):
            table.add(bits)
            table.note_removed(removed)
        handed = [table.start() for table in self._tables] if any(self._tables) else None
        self._handed, self.removed = handed, [np.unique(table.take_removed()) for table in self._tables]
        return handed if base and base == self._base else None

    def complete(self, checkpoint: str) -> None:
        """Records that the checkpoint with the bits last handed over is complete, and its id. Pushes may continue."""
        if self._handed is not None:
            self._base, self._handed = checkpoint, None
