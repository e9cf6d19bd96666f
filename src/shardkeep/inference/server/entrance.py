"""Entrance: takes requests of other threads to the batcher, which lives in an event loop, and their scores back.

Requests that arrive while the loop is busy enter it together: one wake-up of the loop for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from queue import Empty, SimpleQueue

from shardkeep.inference.protocol.status import Refusal, Status
from shardkeep.inference.server.batcher import Batcher, Scored
from shardkeep.inference.server.signature import Rows

WAIT_S = 120.0
"""A request that has waited so long is given up."""

_Answer = SimpleQueue[Scored | BaseException]


class Entrance:
    """To be made in the batcher's event loop."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Rows, int, _Answer]] = deque()
        self._called = False

    def scores(self, rows: Rows, size: int) -> Scored:
        """As of `Batcher.submit`. Blocks. Any thread but the loop's may call."""
        answer: _Answer = SimpleQueue()
        self._waiting.append((rows, size, answer))
        if not self._called:  # two threads may both call: the second call finds nothing
            self._called = True
            self._loop.call_soon_threadsafe(self._enter)
        try:
            result = answer.get(timeout=WAIT_S)
        except Empty:
            raise Refusal(Status.INTERNAL, f"no scores within {WAIT_S:g} s") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _enter(self) -> None:
        self._called = False  # first: a request from now on calls again
        while self._waiting:
            rows, size, answer = self._waiting.popleft()
            try:
                self._batcher.submit(rows, size).add_done_callback(partial(_leave, answer))
            except Refusal as refusal:
                answer.put(refusal)


def _leave(answer: _Answer, scored: asyncio.Future[Scored]) -> None:
    answer.put(scored.exception() or scored.result())
