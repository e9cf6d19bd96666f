"""Work of several ranks, each a thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardkeep.workers.collectives.collective import Collective

C = TypeVar("C", bound=Collective)
T = TypeVar("T")


def run_ranks(collectives: Sequence[C], work: Callable[[C], T]) -> list[T]:
    """Runs `work` in one thread per rank and returns the results in rank order.

    The first failure closes the group, so that no other rank waits for it, and is raised here. Garbage is not collected
    meanwhile: torch may collect it while it holds the lock of its random numbers, lets another thread run that waits
    for this lock, and then none of them runs again (seen once with torch 2.13).
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def one(collective: C) -> None:
        try:
            results[collective.rank] = work(collective)
        except BaseException as error:
            failures.append(error)
            collective.close()

    threads = [threading.Thread(target=one, args=(c,), name=f"worker-{c.rank}") for c in collectives]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.enable()
    if failures:
        raise failures[0]
    return [results[c.rank] for c in collectives]
