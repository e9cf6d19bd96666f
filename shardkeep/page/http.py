"""The page over HTTP, by uvicorn in an event loop of its own. Bounds what clients can take before they show a token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardkeep.page.app import ABORT, PageApp
from shardkeep.page.state import RunState
from shardkeep.page.streams import Streams

MOST_CONNECTIONS = 128
HEAD_S = 10.0
"""Seconds for the head of a request."""
MOST_HEAD_BYTES = 16 << 10


async def serve(
    listener: socket.socket,
    runs: Sequence[RunState],
    token: str,
    *,
    tls: ssl.SSLContext | None,
    woken: socket.socket,
    started: Callable[[Callable[[], None]], None],
) -> None:
    """Serves until `woken` is readable. `started`: gets a call that is safe in any thread and ends it, too."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    streams = Streams(runs)
    app = PageApp(streams, token, secure=tls is not None)
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, timeout_keep_alive=30, proxy_headers=False, interface="asgi3", timeout_graceful_shutdown=1,
    )  # fmt: skip
    config.load()
    config.ssl = tls
    server = _Server(config)
    started(partial(_stop, loop, stopping))
    loop.add_reader(woken, stopping.set)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    ending = asyncio.create_task(stopping.wait())
    await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(woken)
    await streams.close()
    server.should_exit = True
    await running
    ending.cancel()


def _stop(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(stopping.set)


class _Protocol(HttpToolsProtocol):
    """Closes connections that are too many, too slow or too long before the request is known."""

    _head_bytes = -1
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._in_time()
        self._head_bytes = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes >= 0 and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)
        super().data_received(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._head_bytes = 0

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Leaves signals to the process that it is in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
