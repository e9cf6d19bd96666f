"""Pulls ahead: the rows of later steps, requested while a step trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from shardkeep.base.errors import UserError
from shardkeep.ps.client.push import Grads, Pulls
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.ps.jagged import JaggedRows

B = TypeVar("B")
L = TypeVar("L")
Around = AbstractContextManager[None]


class Pending(Generic[L]):
    """Rows of a later step, which are on their way."""

    def __init__(
        self, step: int, request: Request, made: Callable[[Pull, JaggedRows], L], around: Callable[[], Around]
    ) -> None:
        self.step = step
        """The step that the rows are of."""
        self.request = request
        self.pull: Pull | None = None
        """None = not sent yet."""
        self._made = made
        self._around = around

    def result(self) -> L:
        """The lookup. Blocks until its rows are there.

        Raises UserError where they cannot come before an earlier step is applied, and what `lookup` raises."""
        if self.pull is None:
            raise UserError(f"prefetch: the rows of step {self.step} cannot come yet; apply the steps before it first")
        with self._around():
            return self._made(self.pull, self.pull.result())


class PullsAhead:
    """Sends the pulls of later steps in their order, as early as the consistency mode allows.

    Args:
        window: Steps whose pulls may be under way, the running one included.
        around: A context for each wait for rows.
    """

    def __init__(self, rows: RowClient, *, window: int, around: Callable[[], Around]) -> None:
        self._rows = rows
        self._around = around
        self._window = window
        self._waiting: list[Pending[Any]] = []
        self._next = 0

    @property
    def pending(self) -> bool:
        """Whether a lookup was requested."""
        return self._next > 0

    def add(
        self, running: int, step: int | None, request: Request, made: Callable[[Pull, JaggedRows], L]
    ) -> Pending[L]:
        """Adds the lookup of a step; None = the first one, from the running one on, that has none here yet."""
        step = max(self._next, running) if step is None else step
        self._next = max(self._next, step + 1)
        pending = Pending(step, request, made, self._around)
        self._waiting.append(pending)
        self.send(running)
        return pending

    def send(self, step: int) -> None:
        """Sends the pulls that may go while `step` runs."""
        for pending in self._due(step):
            pending.pull = self._rows.pull(pending.step, pending.request)

    def push(self, step: int, request: Request, grads: Grads, pulls: Pulls, lr_factor: float) -> None:
        """Ends a step by its push, with the pull of a later step in the same call where one may go."""
        due = self._due(step + 1)
        if not due:
            self._rows.push(step, request, grads, pulls=pulls, lr_factor=lr_factor)
            return
        first, *rest = due
        following = first.step, first.request
        first.pull = self._rows.exchange(step, request, grads, *following, pulls=pulls, lr_factor=lr_factor)
        for pending in rest:
            pending.pull = self._rows.pull(pending.step, pending.request)

    def _due(self, step: int) -> list[Pending[Any]]:
        """Takes the lookups whose pulls may go while `step` runs, in the order of their steps."""
        if not self._waiting:
            return []
        due = [pending for pending in self._waiting if step <= pending.step < step + self._window]
        self._waiting = [pending for pending in self._waiting if pending.step >= step + self._window]
        return sorted(due, key=lambda pending: pending.step)

    def forget(self, step: int) -> None:
        """Forgets lookups that a loop will not use; `step` is the running one."""
        self._waiting.clear()
        self._next = step


def batches_with_rows(
    batches: Iterable[B],
    prefetch: Callable[[B], Pending[L]],
    depth: int,
    *,
    running: Callable[[], int],
    forget: Callable[[int], None],
) -> Iterator[tuple[B, L]]:
    """`EmbeddingClient.ahead`. `running`: returns the running step. `forget`: as `PullsAhead.forget`."""
    if depth < 1:
        raise UserError(f"ahead: depth {depth}; allowed: 1 or more")
    return _with_rows(batches, prefetch, depth, running, forget)


def _with_rows(
    batches: Iterable[B],
    prefetch: Callable[[B], Pending[L]],
    depth: int,
    running: Callable[[], int],
    forget: Callable[[int], None],
) -> Iterator[tuple[B, L]]:
    waiting: deque[tuple[B, Pending[L]]] = deque()

    def first() -> tuple[B, L]:
        batch, pending = waiting.popleft()
        if pending.step != running():
            why = "call apply for every batch, without rows to skip it"
            raise UserError(f"ahead: step {running()} was not ended; {why}")
        return batch, pending.result()

    try:
        for batch in batches:
            waiting.append((batch, prefetch(batch)))
            if len(waiting) > depth:
                yield first()
        while waiting:
            yield first()
    finally:
        forget(running())
