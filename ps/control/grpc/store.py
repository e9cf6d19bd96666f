"""Hosts the TCPStore through which generations meet, on a socket of our own, so that it listens where we say.

It is used only while a generation forms, and closed when one is given up, so that a member that waits in it for a dead
member learns of it; the next generation opens another. Without `master_listen_fd` it listens on every interface,
and it authenticates nobody.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from shardkeep.base.errors import ConfigError


class StoreHost:
    """Opens the store at the first generation.

    Args:
        bind: Interface to listen on, at any free port; members get this host.
    """

    def __init__(self, *, bind: str = "127.0.0.1") -> None:
        self._bind = bind
        self._store: Any = None
        self._bound = 0
        self._lock = threading.Lock()

    def open(self, generation: int) -> tuple[str, int]:
        """Host and port of the store for `generation`. Raises ConfigError."""
        del generation  # all that meet in one store do so under prefixes of their own
        self.prepare()
        return self._bind, self._bound

    def prepare(self) -> None:
        """Opens the store ahead of the first generation; it takes a second. Raises ConfigError."""
        with self._lock:
            if self._store is None:
                self._store, self._bound = self._listen()

    def close(self) -> None:
        """Ends the store; groups that are formed continue without it."""
        with self._lock:
            self._store = None

    def _listen(self) -> tuple[Any, int]:
        # imported here: torch takes a second, and a coordinator answers its members before
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            listener = socket.create_server((self._bind, 0), backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._bind} ({error.strerror or error})") from error
        port = listener.getsockname()[1]
        # the store closes the descriptor: hand it over
        store = TCPStore(self._bind, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, port
