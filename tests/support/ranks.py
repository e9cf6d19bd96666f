"""Work of several ranks, each a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shardkeep.workers.collective import ThreadCollective

T = TypeVar("T")


def run_ranks(collectives: list[ThreadCollective], work: Callable[[ThreadCollective], T]) -> list[T]:
    """Runs `work` in one thread per rank and returns the results in rank order.

    The first failure aborts the group, so that no other rank waits for it, and is raised here.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def one(collective: ThreadCollective) -> None:
        try:
            results[collective.rank] = work(collective)
        except BaseException as error:
            failures.append(error)
            collective.abort(f"worker {collective.rank}: {error}")

    threads = [threading.Thread(target=one, args=(c,), name=f"worker-{c.rank}") for c in collectives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[c.rank] for c in collectives]
