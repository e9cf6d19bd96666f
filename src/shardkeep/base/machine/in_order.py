"""Results of several threads in the order of their work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(pool: Executor, ahead: int, call: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """Yields the result of `call` for each item, while the pool's threads work on at most `ahead` later items. Raises
    what the first call in order raises. Calls that have not begun when the generator closes are cancelled."""
    waiting = deque[Future[R]]()
    try:
        for item in items:
            waiting.append(pool.submit(call, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()
