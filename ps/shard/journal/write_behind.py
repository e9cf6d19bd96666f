"""Write-behind: what is appended to large files goes to disk soon, and out of the page cache. Knows no records."""

from __future__ import annotations

import queue
import threading
from collections import deque
from pathlib import Path

from shardkeep.base.files import let_go

_Range = tuple[Path, int, int]  # a file, where in it some bytes start, and how many they are


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

    def close(self, limit_s: float | None = 1.0) -> None:
        """Ends the thread; waits for it no longer than `limit_s`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(limit_s)
            self._thread = None

    def _tell(self, path: Path, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter ends: then pages stay
                return
            self._thread = thread
        self._queue.put((path, start, stop - start))

    def _run(self) -> None:
        kept: deque[_Range] = deque()
        while (told := self._queue.get()) is not None:
            let_go(*told)  # begins to write it
            kept.append(told)
            while len(kept) > 1 and sum(size for _, _, size in kept) > self._kept:
                let_go(*kept.popleft())  # written by now, where the disk keeps up, so that it goes
