"""Pages: an array of zeros. The system allocates its memory on first touch, and parts of it can be returned.

Knows nothing of the array's content.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)

SMALL, LARGE = mmap.PAGESIZE, 2 << 20
"""Bytes of a page, the unit of allocation. Large pages reduce TLB misses."""

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
ADVICE = {SMALL: getattr(mmap, "MADV_NOHUGEPAGE", None), LARGE: getattr(mmap, "MADV_HUGEPAGE", None)}
"""Advice for each size of pages; None = the system has none."""
GIVE_BACK = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None  # elsewhere it may do nothing
"""Advice that returns pages to the system; None = the system takes none."""


class Pages(Generic[T]):
    """`array`: `count` zeros, from a multiple of `page_bytes` on. Large pages are a wish; a system may have none."""

    def __init__(self, count: int, dtype: type[T], *, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        size = count * np.dtype(dtype).itemsize
        self._memory = mmap.mmap(-1, size + page_bytes, **_PRIVATE)
        if (advice := ADVICE[page_bytes]) is not None:
            with contextlib.suppress(OSError):  # a kernel without large pages
                self._memory.madvise(advice)
        plain = np.frombuffer(self._memory, dtype=np.uint8)
        self._skip = -plain.ctypes.data % page_bytes
        self.array: npt.NDArray[T] = plain[self._skip : self._skip + size].view(dtype)

    def up(self, items: int) -> int:
        """Bytes of the pages that the first so many items touch."""
        return -(-items * self.array.itemsize // self.page_bytes) * self.page_bytes

    def give_back(self, begin_bytes: int, end: int) -> int:
        """Returns memory to the system: pages from `begin_bytes` on, a multiple of a page, that end before item
        `end`. Zeros are left. Returns the number of bytes; 0 where a system cannot do it."""
        return self._return(begin_bytes, end * self.array.itemsize // self.page_bytes * self.page_bytes)

    def give_back_behind(self, items: int, touched: int) -> int:
        """Returns the pages behind the first `items` to the system, also the last of those that the first `touched`
        items are in. The same zeros and result."""
        return self._return(self.up(items), min(self.up(touched), self.array.nbytes // SMALL * SMALL))

    def _return(self, begin: int, end: int) -> int:
        if GIVE_BACK is None or end <= begin:
            return 0
        self._memory.madvise(GIVE_BACK, self._skip + begin, end - begin)
        return end - begin
