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
HEAD_S = 10
"""Seconds for the head of a request, and for the next one on the same connection."""
MOST_HEAD_BYTES = 16 << 10
CONNECTIONS_PER_S, BURST = 8, 32
"""Connections accepted a second, and at once after a pause. The others wait in the backlog: a refusal takes most of a
millisecond of CPU, which training needs. A browser opens at most six."""


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
        server_header=False, timeout_keep_alive=HEAD_S, proxy_headers=False, interface="asgi3",
        timeout_graceful_shutdown=1,
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
    """Bounds connections, and the time and the bytes of the head of a request. They are read before the token is known.

    A connection that is one too many takes the place of the one that has sent nothing whole for longest."""

    _waits_since: float | None = None
    """None = a request is being answered."""
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
            idle = [one for one in waiting if one._waits_since is not None]
            min(idle, key=lambda one: one._waits_since or 0.0, default=self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waits_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.drop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def drop(self) -> None:
        """Closes the connection at once, and counts it no more."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self._stop_waiting()
        self._waits_since, self._head_bytes = self.loop.time(), 0
        self._deadline = self.loop.call_later(HEAD_S, self.drop)

    def _stop_waiting(self) -> None:
        self._waits_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Accepts so many connections a second, and leaves signals to the process that it is in."""

    _accepting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._accept(*sockets or ()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        await super().shutdown(sockets=sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop, opening = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        free, seen = float(BURST), loop.time()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no file descriptor is free, or the client has gone
                await asyncio.sleep(1 / CONNECTIONS_PER_S)
                continue
            task = asyncio.create_task(self._open(connection))
            opening.add(task)
            task.add_done_callback(opening.discard)
            now = loop.time()
            free, seen = min(free + (now - seen) * CONNECTIONS_PER_S, BURST) - 1, now
            if free < 0:
                await asyncio.sleep(-free / CONNECTIONS_PER_S)

    async def _open(self, connection: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        made = partial(_Protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        with contextlib.suppress(OSError):  # a handshake failed, or the client has gone
            await loop.connect_accepted_socket(made, connection, ssl=config.ssl)
