"""Prefetch: one thread that makes the coming items while the current one is used. Knows no batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Calls `make(i)` for i in [start, stop) in another thread, at most `depth` items ahead of `next`.

    An exception of `make` is raised by the `next` that would have returned its item.
    """

    def __init__(self, make: Callable[[int], Item], *, start: int, stop: int, depth: int) -> None:
        self._make = make
        self._range = range(start, stop)
        self._ready: queue.Queue[Item | BaseException] = queue.Queue(maxsize=max(depth, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Item:
        """The next item; blocks until it is made."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def ready(self) -> bool:
        """Whether `next` would return at once."""
        return not self._ready.empty()

    def close(self) -> None:
        """Stops the thread once the running `make` has returned."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # makes room for a blocked put
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _run(self) -> None:
        for i in self._range:
            try:
                item: Item | BaseException = self._make(i)
            except BaseException as error:
                item = error
            self._ready.put(item)
            if self._closed.is_set() or isinstance(item, BaseException):
                return
