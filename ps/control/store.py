"""Hosts the TCPStore through which generations meet, on a socket of our own, so that it listens where we say.

One per incarnation of the coordinator, reused by all generations (each works under its own prefix). Without
`master_listen_fd` a TCPStore listens on every interface, and it authenticates nobody.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from shardkeep.base.errors import ConfigError


class StoreHost:
    """Opens the store at the first generation.

    Args:
        bind: Interface to listen on.
        port: 0 = any free one.
        advertise: Host that members are told; None = `bind`.
    """

    def __init__(self, *, bind: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> None:
        self._bind = bind
        self._port = port
        self._advertise = advertise or bind
        self._store: Any = None
        self._lock = threading.Lock()

    def open(self, generation: int) -> tuple[str, int]:
        """Host and port of the store for `generation`: the same one every time. Raises ConfigError."""
        del generation  # the seam: a store per generation would take it
        self.prepare()
        return self._advertise, self._port

    def prepare(self) -> None:
        """Opens the store ahead of the first generation; it takes a second. Raises ConfigError."""
        with self._lock:
            if self._store is None:
                self._store, self._port = self._listen()

    def close(self) -> None:
        """Ends the store; groups that are formed go on without it."""
        with self._lock:
            self._store = None

    def _listen(self) -> tuple[Any, int]:
        # imported here: torch takes a second, and a coordinator answers its members before
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            listener = socket.create_server((self._bind, self._port), backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._bind}:{self._port} ({error.strerror or error})") from error
        port = listener.getsockname()[1]
        # the store closes the descriptor: hand it over
        store = TCPStore(self._bind, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, port
