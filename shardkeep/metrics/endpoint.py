"""Endpoint: answers GET requests of people and programs that show the view token, in a thread with an event loop.

Made to cost a training process nothing: few connections, a short time for each, a pause after each, small requests.
Knows no metrics: it serves functions by path.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.base.log import EventLog
from shardkeep.ps.control.grpc.addresses import join_address, split_address
from shardkeep.ps.control.grpc.listening import listening_socket, named_host
from shardkeep.ps.control.grpc.tls import Tls
from shardkeep.trust.view import shows_token

_log = EventLog("metrics")
MOST_CONNECTIONS = 16
"""The oldest one is closed for the next: a complete request is answered at once, so the oldest is a slow one."""
BACKLOG = 16
REQUEST_S = 5.0
"""Seconds from a connection to the end of its reply."""
REQUEST_BYTES = 8192
PAUSE_S = 0.2
"""Seconds between two connections: a flood gets five a second, and less than a percent of a core."""
START_S = 10.0
READY = "/ready"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """The body of a reply and what it is."""

    body: bytes
    content: str = _TEXT


Pages = Mapping[str, Callable[[], Reply]]
"""Path -> what makes its reply, called in the endpoint's thread."""


@dataclass(frozen=True, slots=True)
class Access:
    """`token`: that every request shows, except one for `/ready`. `tls`: mutual TLS; None = plain."""

    token: str = field(repr=False)
    tls: Tls | None = field(default=None, repr=False)

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"


class Endpoint:
    """Listens from its construction to `close`.

    Args:
        listen: HOST:PORT, port 0 = any free one.
        access: Who gets replies.
        pages: What they get.

    `address`: by which others reach it; of an endpoint that listens on all addresses, with the machine's name.

    Raises ConfigError if it cannot listen there.
    """

    def __init__(self, listen: str, access: Access, pages: Pages) -> None:
        self._access, self._pages = access, pages
        host, port = split_address(listen, lowest_port=0)
        self._socket = listening_socket(host, port, backlog=BACKLOG)
        self.address = join_address(named_host(host), self._socket.getsockname()[1])
        self._context = None if access.tls is None else _context(access.tls)
        self._open: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return f"{self._access.scheme}://{self.address}"

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has ended since
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda _loop, _context: None)  # a broken connection is its peer's matter
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            for task in (accepting, *self._open):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(accepting, *self._open, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))  # transports that are aborted close their sockets
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            await self._wait_for_peer()
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:  # the peer is gone
                continue
            except OSError:  # no descriptor is free
                await asyncio.sleep(1.0)
                continue
            connection.setblocking(False)
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._serve(connection))
            self._open[task] = None
            task.add_done_callback(lambda done, connection=connection: self._forget(done, connection))  # type: ignore[misc]
            await asyncio.sleep(PAUSE_S)

    async def _wait_for_peer(self) -> None:
        """In place of `sock_accept`, which loses a connection if it is cancelled."""
        comes = asyncio.Event()
        self._loop.add_reader(self._socket, comes.set)
        try:
            await comes.wait()
        finally:
            self._loop.remove_reader(self._socket)

    def _forget(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._open.pop(task, None)
        connection.close()  # a task that is cancelled before it begins has not

    async def _serve(self, connection: socket.socket) -> None:
        """Answers one request, and closes the connection in any case."""
        reader = asyncio.StreamReader(REQUEST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            try:
                async with asyncio.timeout(REQUEST_S):
                    transport, _ = await self._loop.connect_accepted_socket(
                        lambda: protocol, connection, ssl=self._context
                    )
                    writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                    writer.write(await self._answer(reader))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            finally:
                if transport is not None:
                    transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return _packed(400, "no request of HTTP, or one with too long a head\n")
        line, *lines = head.split(b"\r\n")
        words = line.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _packed(400, "no request of HTTP/1.1\n")
        method, path = words[0], words[1].partition(b"?")[0].decode("latin-1")
        shown = next((value.strip() for name, value in map(_header, lines) if name == b"authorization"), None)
        if path != READY and not shows_token(shown, self._access.token):
            return _packed(401, "no token, or a wrong one; send the header Authorization: Bearer TOKEN\n")
        if method != b"GET":
            return _packed(405, "only GET is served\n")
        if path == READY:
            return _packed(200, "ready\n")
        page = self._pages.get(path)
        if page is None:
            return _packed(404, f"served here: {', '.join([*self._pages, READY])}\n")
        try:
            return _packed(200, page())
        except Exception as error:  # a figure that cannot be read must not end the thread
            _log.warning("a request failed", path=path, why=f"{type(error).__name__}: {error}")
            return _packed(500, "the figures cannot be read; the log says why\n")


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value


def _packed(status: int, reply: Reply | str) -> bytes:
    reply = Reply(reply.encode()) if isinstance(reply, str) else reply
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {reply.content}",
        f"Content-Length: {len(reply.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["WWW-Authenticate: Bearer"] if status == 401 else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + reply.body


def _context(tls: Tls) -> ssl.SSLContext:
    """For a listener that takes only peers whose certificate the same authority signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # for this user alone; the module ssl reads files only
        certificate = Path(folder) / "both.pem"
        certificate.write_bytes(tls.certificate + b"\n" + tls.key)
        context.load_cert_chain(certificate)
    context.load_verify_locations(cadata=tls.ca.decode("ascii", errors="replace"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context
