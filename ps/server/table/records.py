"""Records: fixed-width rows of float32 words in blocks that never move.

Only storage. What the words mean is the table's business; the first two hold the row's id.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkeep.ps.server.pages import LARGE, SMALL, Pages
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS_DTYPE

_BLOCK_BYTES = 8 << 20
_REGION_BYTES = 128 << 20
"""The largest single allocation. Only touched pages use memory."""

_LARGE_FROM_BYTES = 8 << 20
"""From this size on a large page, most of it unused, is a small part of the table."""
_GIVE_BACK_FROM_BYTES = 4 << 20


class Records:
    """Append-only storage of records of `width` words. Not thread safe.

    An id may begin at any word: x86-64 and ARM64 read it as fast as an aligned one.

    Growth is one more region: as many blocks as there are, at first of small pages, so that a small table takes little.
    """

    def __init__(self, width: int, blocks: Any = None) -> None:
        """`blocks`: where the records lie, for kernels, as a part of a table's descriptor; None = apart."""
        if width < 2:
            raise ValueError(f"width {width}: a record has 2 words or more")
        self.width = width
        self.shift = max(64, _BLOCK_BYTES // (width * 4)).bit_length() - 1
        self._regions: list[Pages[np.float32]] = []
        self.addresses = np.zeros(1, dtype=np.int64)
        self.blocks = np.zeros(1, dtype=BLOCKS_DTYPE)[0] if blocks is None else blocks
        """As kernels take them."""
        self.blocks["shift"], self.blocks["width"] = self.shift, width
        self.capacity = 0
        self._highest = 0  # records that were in use since memory was last given back

    def size_bytes(self, count: int) -> int:
        """Bytes of all pages that hold one of the first `count` records."""
        words, total = count * self.width, self.addresses.nbytes
        for region in self._regions:
            touched = min(words, region.array.size)
            total += region.up(touched)
            words -= touched
        return total

    def reserve(self, count: int) -> None:
        """Makes room for `count` records in all."""
        block = 1 << self.shift
        while self.capacity < count:
            most = max(1, _REGION_BYTES // (block * self.width * 4))
            self._append(min(max(1, self.capacity // block), most))

    def give_back(self, count: int) -> None:
        """Returns the memory behind the first `count` records to the system, once it is a large part of them."""
        self._highest = max(self._highest, count)
        if self._highest - count < max(_GIVE_BACK_FROM_BYTES // (4 * self.width), self._highest // 8):
            return
        first, highest = count * self.width, self._highest * self.width
        for region in self._regions:
            size = region.array.size
            if first < size and highest > 0:
                region.give_back_behind(max(first, 0), min(highest, size))
            first, highest = first - size, highest - size
        self._highest = count

    def _append(self, blocks: int) -> None:
        words = self.width << self.shift
        large = 4 * self.width * self.capacity >= _LARGE_FROM_BYTES
        region = Pages(blocks * words, np.float32, page_bytes=LARGE if large else SMALL)
        at = self.capacity >> self.shift
        while at + blocks > self.addresses.size:
            self.addresses = np.concatenate([self.addresses, np.zeros_like(self.addresses)])
        self.addresses[at : at + blocks] = region.array.ctypes.data + 4 * words * np.arange(blocks)
        self.blocks["addresses"] = self.addresses.ctypes.data
        self._regions.append(region)
        self.capacity += blocks << self.shift
