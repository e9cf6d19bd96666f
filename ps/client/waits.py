"""ReplyWaits: how long one worker waits for each server's replies. In place of `ServerCalls.replies`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from shardkeep.base.arrays import Bytes
from shardkeep.ps.client.calls import ServerCalls
from shardkeep.ps.wire.message import Kind, Packed


class ReplyWaits:
    """Waits for the replies to a step's messages, and measures the waits. Not thread safe.

    Where replies of several servers are missing, the last one to arrive gets the whole wait: without that server the
    worker would not have waited so long."""

    def __init__(self, calls: ServerCalls, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[int, float] = {}
        """Seconds of waiting so far, by server."""
        self._calls, self._clock = calls, clock

    def replies(self, futures: Sequence[tuple[int, Future[Bytes]]], expected: Kind) -> Iterator[tuple[int, Packed]]:
        """As `ServerCalls.replies`."""
        waited_s, last = 0.0, -1
        for server, future in futures:
            if future.done():
                yield server, self._calls.reply(server, future, expected)
                continue
            began = self._clock()
            reply = self._calls.reply(server, future, expected)
            waited_s, last = waited_s + self._clock() - began, server  # those before it had come
            yield server, reply
        if last >= 0:
            self.seconds[last] = self.seconds.get(last, 0.0) + waited_s
