"""Write-behind: what is appended to large files goes to disk soon, and out of the page cache. Knows no records.

A page cache that grows with a log takes memory that others could use, and in a virtual machine each page that its host
has not given out yet costs a fault there: 2 ms of CPU a MiB appended, where pages that come around again cost 0.2.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from pathlib import Path

_Range = tuple[Path, int, int]  # a file, and where in it a range of bytes starts and stops


class WriteBehind:
    """Tells the system, from a thread of its own, which bytes of growing files nobody will read soon.

    A hint: it changes no file and what a file survives, and nothing fails where a system or a disk does not take it.
    """

    def __init__(self, *, chunk_bytes: int = 8 << 20, kept_bytes: int = 32 << 20) -> None:
        """`chunk_bytes`: of a file, after which it is told; `kept_bytes`: the last ones of all files, which stay."""
        self._chunk, self._kept = chunk_bytes, kept_bytes
        self._queue: queue.SimpleQueue[_Range | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def grew(self, path: Path, before: int, size: int) -> None:
        """A file has grown from `before` to `size` bytes."""
        if size // self._chunk > before // self._chunk:
            self._tell(path, before // self._chunk * self._chunk, size // self._chunk * self._chunk)

    def ended(self, path: Path, size: int) -> None:
        """A file will grow no more: its end, after the last whole chunk."""
        if size >= self._chunk:
            self._tell(path, size // self._chunk * self._chunk, size)

    def close(self) -> None:
        """Ends the thread; waits for it for a second at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(1.0)
            self._thread = None

    def _tell(self, path: Path, start: int, stop: int) -> None:
        if start == stop or not hasattr(os, "posix_fadvise"):
            return
        self._queue.put((path, start, stop))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        kept: deque[_Range] = deque()
        while (told := self._queue.get()) is not None:
            _not_needed(*told)  # begins to write it
            kept.append(told)
            while sum(stop - start for _, start, stop in kept) > self._kept:
                _not_needed(*kept.popleft())  # by now it is written, and goes


def _not_needed(path: Path, start: int, stop: int) -> None:
    """Linux writes dirty pages of the range, without waiting, and drops clean ones (mm/fadvise.c)."""
    with contextlib.suppress(OSError):  # deleted meanwhile
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
