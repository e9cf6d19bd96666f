"""Deadlines: one object carries the time that is left through a chain of blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shardkeep.base.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """`timeout_s` from now on."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self.timeout_s = timeout_s

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left; never below 0."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def over(self) -> bool:
        return self.elapsed_s >= self.timeout_s

    def check(self, waited_for: str) -> None:
        """Raises DeadlineExceeded, naming what was waited for and for how long, once the time is over."""
        if self.over:
            raise DeadlineExceeded(f"waited {self.elapsed_s:.1f} s for {waited_for} (limit {self.timeout_s:g} s)")


def wait_for_reply(future: Future[T], *, peer: str, timeout_s: float) -> T:
    """The reply of a peer. Raises DeadlineExceeded, which names peer and elapsed time, or the call's own error."""
    started = time.monotonic()
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        elapsed = time.monotonic() - started
        raise DeadlineExceeded(f"{peer} did not answer within {elapsed:.1f} s (liveness.step_timeout_s)") from None
