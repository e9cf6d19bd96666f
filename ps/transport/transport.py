"""Carries messages from a client to the servers. Knows no message's content."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from shardkeep.base.arrays import Bytes

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
