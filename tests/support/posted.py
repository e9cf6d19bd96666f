"""A server behind a network that delivers messages when, and in the order that, a test says."""

from __future__ import annotations

from concurrent.futures import Future

from shardkeep.base.arrays import Bytes
from shardkeep.ps.shard.service import ShardService
from shardkeep.ps.wire.message import Kind, read


class Posted:
    """A server's handler. Pulls wait until they are delivered; other messages arrive at once."""

    def __init__(self, service: ShardService) -> None:
        self.waiting: list[tuple[Bytes, Future[Bytes]]] = []
        self._service = service

    def __call__(self, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        if read(message).kind is not Kind.PULL:
            return self._service.handle(message, then)
        reply: Future[Bytes] = Future()
        self.waiting.append((message, reply))
        return reply

    def deliver(self, place: int) -> None:
        """Delivers one of the pulls that wait, and its answer."""
        message, reply = self.waiting.pop(place)
        reply.set_result(self._service.handle(message).result(20))
