"""Batcher: joins requests that wait into one batch. Lives in an event loop; scores in a thread of its own or, where a
batch is small, in the loop itself.

A batch waits for as many requests as there lately were at a time, and no longer than a bound. So requests of several
clients are joined, and a single client does not wait."""

# N = rows, T = labels

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardkeep.inference.protocol.status import Refusal, Status
from shardkeep.inference.server.metrics import Metrics
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.settings import Limits
from shardkeep.inference.server.signature import Answer, Rows

INLINE_ROWS = 256
"""A batch up to this size takes a millisecond or two: less than it would cost to hand it to a thread."""
INLINE_BYTES = 64 << 10
"""A row can have any number of values, of which these have 20 milliseconds; and the event loop answers probes."""


@dataclass(frozen=True, slots=True)
class Scored:
    """`model`: the one that scored."""

    answer: Answer
    model: Loaded


class Goal:
    """How many requests a batch waits for: one more than there were, now and then, and else as many.

    `PROBE_EVERY`: after a wait in vain so many batches do not try for more."""

    PROBE_EVERY = 100

    def __init__(self) -> None:
        self.requests = 1
        self._hold = 0

    def reached(self, requests: int) -> None:
        """A batch of so many began before its bound."""
        if self._hold and requests <= self.requests:
            self._hold -= 1
        else:
            self.requests = requests + 1

    def missed(self, requests: int) -> None:
        """A batch of so many began at its bound."""
        self.requests = max(requests, self.requests - 1, 1)  # one late client is no reason to stop waiting
        self._hold = self.PROBE_EVERY


@dataclass(slots=True)
class _Waiting:
    rows: Rows
    size: int
    answer: asyncio.Future[Scored]


class Batcher:
    """Scores requests in the order of arrival. To be made and used in one event loop."""

    def __init__(self, served: ServedModel, limits: Limits, metrics: Metrics) -> None:
        self._served, self._limits, self._metrics = served, limits, metrics
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._rows = self._size = 0
        self._timer: asyncio.Handle | None = None
        self._goal = Goal()
        self._busy = self._closed = self._soon = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, rows: Rows, size: int) -> asyncio.Future[Scored]:
        """The scores of a request. Raises Refusal: the queue is full, or the server stops.

        Args:
            size: Bytes of the request."""
        if self._closed:
            raise Refusal(Status.STOPPING, "the server is stopping; send the request to another one")
        if len(self._queue) >= self._limits.requests or (self._queue and self._size + size > self._limits.size):
            raise Refusal(Status.BUSY, f"{len(self._queue)} requests wait already; try again later")
        answer: asyncio.Future[Scored] = self._loop.create_future()
        self._queue.append(_Waiting(rows, size, answer))
        self._rows += rows.count
        self._size += size
        self._idle.clear()
        self._plan()
        return answer

    async def close(self) -> None:
        """Refuses further requests and returns when all that wait are answered."""
        self._closed = True
        self._plan()
        await self._idle.wait()
        self._thread.shutdown()

    def _plan(self) -> None:
        """Decides when the next batch runs."""
        if self._busy or not self._queue:
            return
        enough = len(self._queue) >= self._goal.requests or self._rows >= self._limits.rows
        if enough or self._closed or not self._limits.delay_s:
            if not self._soon:
                self._soon = True
                self._loop.call_soon(self._run)  # after all requests that have arrived
        elif self._timer is None:
            self._timer = self._loop.call_later(self._limits.delay_s, self._late)

    def _late(self) -> None:
        """The bound of the first request in the queue."""
        self._timer = None
        if not self._busy and not self._soon:
            self._goal.missed(len(self._queue))
            self._run()

    def _run(self) -> None:
        if self._soon:
            self._soon = False
            self._goal.reached(len(self._queue))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._take()
        model = self._served.current
        requests = [each.rows for each in batch]
        num_rows = sum(rows.count for rows in requests)
        self._metrics.batch(num_rows)
        small = num_rows <= INLINE_ROWS and sum(each.size for each in batch) <= INLINE_BYTES
        if small and not any(rows.top for rows in requests):  # a search among all items takes long
            self._answer(batch, model, model.answers(requests))
            return
        self._busy = True
        scoring = self._loop.run_in_executor(self._thread, model.answers, requests)
        scoring.add_done_callback(lambda done: self._scored(batch, model, done))

    def _scored(self, batch: list[_Waiting], model: Loaded, done: asyncio.Future[list[Answer | Refusal]]) -> None:
        self._busy = False
        self._answer(batch, model, done.result())

    def _take(self) -> list[_Waiting]:
        """The requests of the next batch, without those whose client is gone."""
        batch, num_rows = list[_Waiting](), 0
        while self._queue and (not batch or num_rows + self._queue[0].rows.count <= self._limits.rows):
            each = self._queue.popleft()
            self._rows -= each.rows.count
            self._size -= each.size
            if not each.answer.done():
                num_rows += each.rows.count
                batch.append(each)
        return batch

    def _answer(self, batch: Sequence[_Waiting], model: Loaded, results: Sequence[Answer | Refusal]) -> None:
        for each, result in zip(batch, results, strict=True):
            if each.answer.done():
                continue
            if isinstance(result, Refusal):
                each.answer.set_exception(result)
            else:
                each.answer.set_result(Scored(result, model))
        if self._queue:
            self._plan()
        elif not self._busy:
            self._idle.set()
