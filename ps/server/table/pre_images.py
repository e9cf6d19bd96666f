"""PreImages: rows of one table that pushes copy for a snapshot before they change them. Knows no lock and no file."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.ps.server.table.records import Records

EVERY_ROW = np.zeros(0, dtype=np.uint8)
_ONES = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
"""Bits that are set in each byte."""


class PreImages:
    """The bits and copies of a table's rows, which kernels find through its descriptor until `release`."""

    def __init__(self, descriptor: Any, width: int, chosen: Bytes) -> None:
        """`chosen`: bits of the rows in the snapshot; all other rows count as taken. EVERY_ROW = all."""
        rows = int(descriptor["count"])
        size = -(-rows // 8)
        self.bits = ~chosen[:size] if chosen.size else np.zeros(size, dtype=np.uint8)
        if rows % 8:
            self.bits[-1] |= 0xFF << rows % 8 & 0xFF  # there are no such rows
        self.num_rows = 8 * size - int(_ONES[self.bits].sum(dtype=np.int64))
        """Rows in the snapshot."""
        self.records = Records(width)
        self._images = images = descriptor["images"]
        images["blocks"], images["bits"], images["rows"] = self.records.blocks, self.bits.ctypes.data, rows

    @property
    def count(self) -> int:
        """Rows that were copied to `records`."""
        return int(self._images["count"])

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return 4 * self.records.width * self.count

    def make_room(self, rows: int) -> None:
        """Makes room for the copies of so many rows that change, of those in the snapshot."""
        needed = min(self.count + rows, self.num_rows)
        if needed > self.records.capacity:
            self.records.reserve(needed)
            self._images["blocks"] = self.records.blocks

    def take_over(self) -> tuple[Records, int]:
        """The copies and their number. Later copies go to new storage."""
        records, count = self.records, self.count
        self.records = Records(records.width)
        self._images["count"], self._images["blocks"] = 0, self.records.blocks
        return records, count

    def release(self) -> None:
        """Ends the copies."""
        self._images["rows"] = self._images["count"] = 0
