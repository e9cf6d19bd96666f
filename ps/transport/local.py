"""The in-process transport: calls the handlers of servers that live in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.ps.transport.transport import Handler


class LocalTransport:
    """Calls one handler per server. A wait for its reply has a deadline too."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self._handlers = list(handlers)
        self.num_servers = len(self._handlers)

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        if not self._handlers:
            reply: Future[Bytes] = Future()
            reply.set_exception(TransportError(f"server {server} cannot be reached: the transport is closed"))
            return reply
        return self._handlers[server](message) if then is None else self._handlers[server](message, then)

    def close(self) -> None:
        self._handlers = []
