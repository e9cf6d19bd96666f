"""Transport: carries messages from a client to the servers, in this process too. Knows no message's content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError

MAX_INLINE = 32 << 10
"""Most bytes of messages that a transport between processes copies into a call or an answer. Larger messages pass
without a copy."""
Handler = Callable[..., "Future[Bytes]"]
"""Serves a call: takes one message, or two that came together, and returns the future of the reply."""


class Transport(Protocol):
    """Carries one packed message to one server and returns the reply."""

    num_servers: int

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        """Sends `message`, and `then` in the same call, without blocking. The handler returns one reply for both.

        Neither message may change until the future is done. The future holds the packed reply, or raises
        DeadlineExceeded or TransportError."""
        ...

    def close(self) -> None: ...


class LocalTransport:
    """Calls one handler per server, which is in the same process. A wait for its reply has a deadline too."""

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
