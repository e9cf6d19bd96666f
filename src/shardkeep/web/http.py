"""HTTP on one socket, by uvicorn's protocol, in the running event loop. Bounds what clients can take."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from email.utils import formatdate
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from shardkeep.web.site import Limits

RETRY_S = 0.2
"""Between two tries to accept a connection while no file descriptor is free."""
POLL_S = 0.02
"""Between two looks at the connections that end. uvicorn has no event for it."""


class Listening:
    """A socket whose requests an application answers, from now until `stop`. To be made in the event loop.

    In place of `uvicorn.Server`, which wakes ten times a second and accepts any number of connections at once."""

    def __init__(self, listener: socket.socket, app: ASGIApp, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self._listener, self._limits, self._tls = listener, limits, tls
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
            timeout_keep_alive=round(limits.wait_s), proxy_headers=False, interface="asgi3",
        )  # fmt: skip
        config.load()
        self._state = _State()
        self._connected = partial(_Protocol, config, self._state, limits)
        self._opening = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self._free, self._seen = float(limits.burst), self._loop.time()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    async def stop(self, grace_s: float) -> None:
        """Accepts no further connection; running requests have `grace_s` seconds."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        if self._opening:
            await asyncio.wait(self._opening, timeout=POLL_S)
        connections, tasks = self._state.connections, self._state.tasks
        for connection in list(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while connections or tasks:
                    await asyncio.sleep(POLL_S)
        for connection in list(connections):
            connection.transport.abort()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Takes the next connection. In place of `sock_accept`, which loses one if it is cancelled."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError:  # no file descriptor is free
            self._rest(RETRY_S)
            return
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        limits, now = self._limits, self._loop.time()
        self._free = min(self._free + (now - self._seen) * limits.per_s, limits.burst) - 1
        self._seen = now
        if self._free < 0:
            self._rest(-self._free / limits.per_s)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._listen)

    async def _open(self, connection: socket.socket) -> None:
        handshake_s = None if self._tls is None else self._limits.wait_s
        with contextlib.suppress(OSError):  # a handshake failed, or the client has gone
            await self._loop.connect_accepted_socket(
                self._connected, connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )


class _State(ServerState):
    """What the connections of a socket share, with the headers of every reply."""

    _second = 0

    def date(self) -> None:
        """Keeps the header `date` up to date."""
        if (now := int(time.time())) != self._second:
            self._second = now
            self.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class _Protocol(HttpToolsProtocol):
    """Bounds connections, the bytes of the head of a request, and the time that a client takes for it."""

    _waits_since: float | None = None
    """None = a request is being answered."""
    _head_bytes = 0
    """-1 = outside of a head."""
    _ends = False
    """The request was answered before its end, and the connection closes with that."""
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, state: _State, limits: Limits) -> None:
        super().__init__(config, state, {})
        self._state, self._limits = state, limits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._replies = cast("asyncio.Transport", _Replies(self))
        self._wait()
        if len(self.connections) > self._limits.connections:
            waiting = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
            idle = [one for one in waiting if one._waits_since is not None]
            min(idle, key=lambda one: one._waits_since or 0.0, default=self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._state.date()
        super().data_received(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
                self.send_400_response(f"The head of a request is too large; allowed: {self._limits.head_bytes} bytes.")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes, self._waits_since = -1, None
        self._set_deadline(False)
        super().on_headers_complete()
        self.cycle.transport = self._replies

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._ends:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no request follows that came with this one
            self._wait()
            if self.cycle.more_body:
                self._head_bytes = -1

    def end(self) -> None:
        """Closes the connection behind the request. A client that still sends would be reset, and lose the reply."""
        self._ends = self.cycle.more_body
        if not self._ends:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._waits_since is None:
            self._set_deadline(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._waits_since is None:
            self._set_deadline(False)

    def drop(self) -> None:
        """Closes the connection at once, and counts it no more."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self._waits_since, self._head_bytes = self.loop.time(), 0
        self._set_deadline(True)

    def _set_deadline(self, on: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self._limits.wait_s, self.drop) if on else None


class _Replies:
    """The transport as replies see it, whose last one ends the connection."""

    def __init__(self, connection: _Protocol) -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.end
