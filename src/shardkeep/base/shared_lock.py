"""SharedLock: held by any number of threads that read, or by one that changes. Knows no table."""

from __future__ import annotations

import threading


class SharedLock:
    """A thread holds it alone in a `with`, or shares it between `share` and `unshare`. One that wants it alone waits
    for none that comes later to read."""

    def __init__(self) -> None:
        self._turn, self._counting, self._free = threading.Lock(), threading.Lock(), threading.Lock()
        self._readers = 0

    def __enter__(self) -> None:
        with self._turn:
            self._free.acquire()

    def __exit__(self, *_: object) -> None:
        self._free.release()

    def share(self) -> None:
        with self._turn, self._counting:
            if not self._readers:
                self._free.acquire()
            self._readers += 1

    def unshare(self) -> None:
        with self._counting:
            self._readers -= 1
            if not self._readers:
                self._free.release()
