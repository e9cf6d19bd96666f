"""Records: fixed-width rows of float32 words in blocks that never move once they are full size.

Only storage. What the words mean is the table's business; the first two hold the row's id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.ps.shard import index_kernels

_BLOCK_BYTES = 8 << 20
"""A full block: large enough for huge pages (numpy asks for them from 4 MB), small enough to waste little."""
_FIRST_ROWS = 64


class Records:
    """Append-only storage of records of `width` words (even). Not thread safe.

    The first block grows by doubling until it is full size; after that every growth is one more block, so a
    table of any size grows without copying its rows.
    """

    def __init__(self, width: int) -> None:
        if width < 2 or width % 2:
            raise ValueError(f"width {width}: a record has an even number of words, 2 or more")
        self.width = width
        full_rows = max(_FIRST_ROWS, _BLOCK_BYTES // (width * 4))
        self.shift = full_rows.bit_length() - 1
        self._blocks: list[npt.NDArray[np.float32]] = []
        self.addresses = np.zeros(1, dtype=np.int64)
        self.capacity = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks) + self.addresses.nbytes

    def reserve(self, count: int) -> None:
        """Makes room for `count` records in all. May move the first block."""
        full = 1 << self.shift
        if self.capacity < full and count > self.capacity:
            self._grow_first(min(full, max(_FIRST_ROWS, 1 << (count - 1).bit_length())))
        while self.capacity < count:
            self._append(np.empty((full, self.width), dtype=np.float32))
            self.capacity += full

    def ids(self, count: int) -> npt.NDArray[np.int64]:
        """Ids of the first `count` records, in the order of their slots."""
        ids_N = np.empty(count, dtype=np.int64)
        index_kernels.read_ids(self.addresses, self.shift, self.width, ids_N)
        return ids_N

    def _grow_first(self, rows: int) -> None:
        block = np.empty((rows, self.width), dtype=np.float32)
        for old in self._blocks:
            block[: len(old)] = old
        self._blocks.clear()
        self._append(block)
        self.capacity = rows

    def _append(self, block: npt.NDArray[np.float32]) -> None:
        at = len(self._blocks)
        if at == self.addresses.size:
            self.addresses = np.concatenate([self.addresses, np.zeros_like(self.addresses)])
        self._blocks.append(block)
        self.addresses[at] = block.ctypes.data
