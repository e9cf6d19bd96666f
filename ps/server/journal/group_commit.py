"""GroupCommit: one thread that commits the items which wait together, and threads that resolve their futures.

Knows neither files nor records.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from shardkeep.base.errors import JournalError

T = TypeVar("T")
ANSWERING_THREADS = 4
"""As the fewest that run calls (`ps/rpc/group.py`), whose work begins again in these threads."""


class GroupCommit(Generic[T]):
    """Commits items in the order in which they were added. Thread safe.

    The committing thread runs no callback. The futures of one `lane` are resolved in order, in one thread."""

    def __init__(self, commit: Callable[[list[T]], None]) -> None:
        """`commit`: makes a list of items durable, in this object's thread. What it raises is the items' result."""
        self._commit = commit
        self._changed = threading.Condition()
        self._waiting: list[tuple[T, int, Future[None]]] = []
        self._num_added, self._num_committed = 0, 0
        self._due = False
        """Whether somebody waits for an item."""
        self._closed = False
        self._resolving = [queue.SimpleQueue[Callable[[], None] | None]() for _ in range(ANSWERING_THREADS)]
        self._thread = threading.Thread(target=self._run, name="journal-sync", daemon=True)
        self._thread.start()
        for calls in self._resolving:
            threading.Thread(target=_run_calls, args=(calls,), name="journal-answers", daemon=True).start()

    def add(self, item: T, *, lane: int, awaited: bool) -> Future[None]:
        """Queues an item. Its future resolves when it is committed. An item that is not `awaited` is committed with the
        next that is, or by `drain`. Raises JournalError after `close`."""
        future: Future[None] = Future()
        with self._changed:
            if self._closed:
                raise JournalError("the journal is closed")
            self._waiting.append((item, lane, future))
            self._num_added += 1
            if awaited and not self._due:
                self._due = True
                self._changed.notify_all()
        return future

    def drain(self) -> None:
        """Blocks until all items that have been added are committed. Their futures may be resolved later."""
        with self._changed:
            number, self._due = self._num_added, bool(self._waiting)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_committed >= number)

    def close(self) -> None:
        """Commits what waits and ends the threads. Waits for the committing one. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                batch, self._waiting, self._due = self._waiting, [], False
                if self._closed and not batch:
                    break
            try:
                self._commit([item for item, _, _ in batch])
                error = None
            except Exception as failure:  # also a bug: nobody may wait for ever
                error = failure
            for _, lane, future in batch:
                resolve = partial(future.set_result, None) if error is None else partial(future.set_exception, error)
                self._resolving[lane % len(self._resolving)].put(resolve)
            with self._changed:
                self._num_committed += len(batch)
                self._changed.notify_all()
        for calls in self._resolving:
            calls.put(None)


def _run_calls(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
