"""A server behind a network that delivers messages when, and in the order that, a test says."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

from shardkeep.base.arrays import Bytes
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.wire.message import Kind, read


class Posted:
    """A server's handler. Messages of some kinds wait until they are delivered; others arrive at once."""

    def __init__(self, service: ShardService, kinds: Collection[Kind] = (Kind.PULL,)) -> None:
        self.waiting: list[tuple[Bytes, Future[Bytes]]] = []
        self._service, self._kinds = service, kinds

    def __call__(self, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        if read(message).kind not in self._kinds:
            return self._service.handle(message, then)
        reply: Future[Bytes] = Future()
        self.waiting.append((message, reply))
        return reply

    def deliver(self, place: int) -> None:
        """Delivers one of the messages that wait, and its answer."""
        message, reply = self.waiting.pop(place)
        reply.set_result(self._service.handle(message).result(90))
