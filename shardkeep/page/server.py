"""The page's server: a socket that is bound at once, and a thread that loads starlette and uvicorn at the first
connection, so that a page that nobody opens costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import selectors
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.ps.control.grpc.addresses import join_address, split_address
from shardkeep.ps.control.grpc.listening import listening_socket, named_host
from shardkeep.run.json_files import read_json, to_json

if TYPE_CHECKING:
    from shardkeep.page.state import RunState

LOOPBACK = "127.0.0.1:0"
BACKLOG = 64
CLOSE_S = 2.0
NICE = 10
"""The page yields to training where cores are scarce."""
MISSING = "needs starlette and uvicorn: pip install 'shardkeep[web]'"


def installed() -> bool:
    """Whether a page can be served here. Imports nothing of it."""
    return all(importlib.util.find_spec(name) is not None for name in ("starlette", "uvicorn", "httptools"))


class PageServer:
    """Serves the page of some runs from a thread of its own, from now until `close`.

    Args:
        listen: HOST:PORT; port 0 = any free one.
        token: The view token.
        runs: Opens the run folders; called in the thread at the first connection.
        before: Address to take again if it is free.
        tls: For HTTPS; None = HTTP.
    """

    def __init__(
        self,
        listen: str,
        token: str,
        runs: Callable[[], Sequence[RunState]],
        *,
        before: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listens. Raises ConfigError where it cannot, UserError without starlette."""
        if not installed():
            raise UserError(f"the page {MISSING}")
        self._runs, self._token, self._tls = runs, token, tls
        self._socket = _listen(listen, before)
        self.address = join_address(split_address(listen, lowest_port=0)[0], self._socket.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._stop: Callable[[], None] | None = None
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        return page_url(self.address, self._token, secure=self._tls is not None)

    def close(self) -> None:
        """Sends the last state to those who look, and ends."""
        with self._closing, contextlib.suppress(OSError):
            self._wake.send(b"x")
            if self._stop is not None:
                self._stop()
        self._thread.join(CLOSE_S)
        for each in (self._socket, self._wake, self._woken):
            each.close()

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            if any(key.fileobj is self._woken for key, _ in selector.select()):
                return
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        from shardkeep.page.http import serve

        def started(stop: Callable[[], None]) -> None:
            with self._closing:
                self._stop = stop

        asyncio.run(serve(self._socket, self._runs(), self._token, tls=self._tls, woken=self._woken, started=started))


def page_url(address: str, token: str, *, secure: bool = False) -> str:
    """The address for a browser, with the token."""
    host, port = split_address(address)
    shown = join_address(named_host(host), port)
    return f"{'https' if secure else 'http'}://{shown}/?token={token}"


def keep_address(run: Path, address: str, *, secure: bool = False) -> None:
    """Writes where the page of a run is; a coordinator that is restarted takes the same place."""
    atomic_write(run / "page.json", to_json({"address": address, "secure": secure}) + "\n")


def forget_address(run: Path) -> None:
    """Deletes the address of an earlier process of the job."""
    with contextlib.suppress(OSError):
        (run / "page.json").unlink(missing_ok=True)


def kept_address(run: Path) -> tuple[str, bool] | None:
    """Where the page of a run is, or was, and whether it is HTTPS."""
    with contextlib.suppress(OSError, UserError):
        if (found := read_json(run / "page.json")) is not None and isinstance(found.get("address"), str):
            return found["address"], bool(found.get("secure"))
    return None


def _listen(listen: str, before: str | None) -> socket.socket:
    host, port = split_address(listen, lowest_port=0)
    if before is not None and port == 0:
        with contextlib.suppress(ConfigError):
            known = split_address(before)
            if known[0] == host:
                return listening_socket(*known, backlog=BACKLOG)
    return listening_socket(host, port, backlog=BACKLOG)
