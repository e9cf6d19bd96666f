"""Carries messages from a client to the servers. Knows no message's content."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import DeadlineExceeded

Bytes = npt.NDArray[np.uint8]
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


def wait(future: Future[Bytes], *, peer: str, timeout_s: float) -> Bytes:
    """Returns the reply. Raises DeadlineExceeded, which names the peer and the elapsed time, or TransportError."""
    started = time.monotonic()
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        elapsed = time.monotonic() - started
        raise DeadlineExceeded(f"{peer} did not answer within {elapsed:.1f} s (liveness.step_timeout_s)") from None
