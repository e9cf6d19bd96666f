"""Ports that nobody listens at, and that no other process gets meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of all addresses of this machine. Connections are refused until somebody with SO_REUSEADDR, as servers
    set it, listens there."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", 0))
        yield bound.getsockname()[1]
