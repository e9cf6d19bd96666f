"""An address that a process of a test will listen on, and nobody gets by chance."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """A free port of loopback inside the `with`: bound, so that the system gives it to nobody who asks for any port,
    and with SO_REUSEADDR, so that a server that has it, too, listens there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
