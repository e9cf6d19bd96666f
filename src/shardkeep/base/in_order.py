"""Work of several threads whose results come in the order of the work. Knows nothing of what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    pool: Executor, ahead: int, call: Callable[[T], R], items: Iterable[T]
) -> Generator[tuple[T, R], None, None]:
    """Yields each item with the result of `call`, which the pool's threads run for at most `ahead` later items.

    Raises what the first call in order raises. Calls that have not begun when the generator closes are cancelled."""
    waiting = deque[tuple[T, Future[R]]]()
    try:
        for item in items:
            waiting.append((item, pool.submit(call, item)))
            if len(waiting) > ahead:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        for _, result in waiting:
            result.cancel()
