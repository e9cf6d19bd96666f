"""Deadlines: one object carries the time that is left through a chain of blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shardkeep.base.errors import DeadlineExceeded

T = TypeVar("T")
SILENCE_S = 600.0
"""Seconds without a row after which long work counts as stuck: loading, a snapshot, the last checkpoint of a stop."""
LOOK_S = 10.0
"""How often `wait_while_moving` looks."""


def among_all_s(base_s: float, members: int) -> float:
    """The limit of what each member does with every other one. gloo's mesh of 64 members on two cores took 170 us by
    their square; the store's part of it was 21 us."""
    return base_s + members**2 / 5000


def wait_while_moving(waits: Callable[[float], bool], silence_s: float, moves: Callable[[], int]) -> bool:
    """Calls `waits` with some seconds until it is true. False = `moves()` stood still for `silence_s`."""
    deadline, seen = Deadline(silence_s), moves()
    while not waits(min(deadline.remaining_s, LOOK_S)):
        if moves() != seen:
            deadline, seen = Deadline(silence_s), moves()
        elif deadline.over:
            return False
    return True


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
