"""WriteBehind: makes the system write growing files early and drop them from its page cache. Knows no records."""

from __future__ import annotations

import queue
import threading
from collections import deque
from pathlib import Path

from shardkeep.base.files import let_go

_Range = tuple[Path, int, int]  # file, first byte, number of bytes


class WriteBehind:
    """Hints to the system, from its own thread, which bytes of growing files will not be read soon.

    It changes neither a file nor its durability. If a system or disk ignores the hint, nothing fails.
    """

    def __init__(self, *, chunk_bytes: int = 8 << 20, kept_bytes: int = 32 << 20) -> None:
        """`chunk_bytes`: the growth of a file that triggers a hint. `kept_bytes`: the newest bytes of all files that
        stay in the page cache."""
        self._chunk, self._kept = chunk_bytes, kept_bytes
        self._queue: queue.SimpleQueue[_Range | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def grew(self, path: Path, before: int, size: int) -> None:
        """Records that a file has grown from `before` to `size` bytes."""
        if size // self._chunk > before // self._chunk:
            self._tell(path, before // self._chunk * self._chunk, size // self._chunk * self._chunk)

    def ended(self, path: Path, size: int) -> None:
        """Hints the bytes after the last whole chunk of a file that will not grow further."""
        if size >= self._chunk:
            self._tell(path, size // self._chunk * self._chunk, size)

    def close(self, limit_s: float | None = 1.0) -> None:
        """Ends the thread. Waits for it up to `limit_s`."""
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
            except RuntimeError:  # no more threads, or the interpreter exits: the pages stay in the cache
                return
            self._thread = thread
        self._queue.put((path, start, stop - start))

    def _run(self) -> None:
        kept: deque[_Range] = deque()
        while (told := self._queue.get()) is not None:
            let_go(*told)  # starts writing these bytes
            kept.append(told)
            while len(kept) > 1 and sum(size for _, _, size in kept) > self._kept:
                let_go(*kept.popleft())  # written by now if the disk keeps up, so the pages are dropped
