"""The one web server: several addresses with routes of their own, clients that take too long, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shardkeep.base.net.addresses import split_address
from shardkeep.metrics.serving import metrics_site
from shardkeep.page.of_job import open_page
from shardkeep.web.access import Access
from shardkeep.web.routes import Routes, reply_of
from shardkeep.web.server import WebServer
from shardkeep.web.site import Limits, Site
from tests.support.cases import every
from tests.support.http_get import LIMIT_S, get
from tests.support.loop_clock import turned_server

PATIENT_S = 5.0
LIMITS = Limits(connections=8, per_s=100, burst=10, backlog=10, head_bytes=4096, wait_s=PATIENT_S)
CHUNK = bytes(1 << 16)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with contextlib.closing(WebServer()) as web:
        assert "web" not in {thread.name for thread in threading.enumerate()}, "no address, no thread"
        yield web


class Stream:
    """A reply of so many chunks. `over` is set at its end, and when its client has gone.

    `between`: called after each chunk, in the server's loop."""

    def __init__(self, chunks: int, between: Callable[[], None] = lambda: None) -> None:
        self._chunks, self._between = chunks, between
        self.over = threading.Event()

    def site(self) -> Site:
        calls = {"/stream": self._call, "/quick": reply_of(lambda: (b"quick", "text/plain"))}
        return Site(lambda: Routes(Access(), calls, headers={}), Access(), LIMITS)

    def _call(self, _request: Request) -> Response:
        return StreamingResponse(self._parts(), headers={"content-length": str(self._chunks * len(CHUNK))})

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            for _ in range(self._chunks):
                yield CHUNK
                self._between()
                await asyncio.sleep(0)
        finally:
            self.over.set()


@contextlib.contextmanager
def sent(address: str, *paths: str) -> Iterator[socket.socket]:
    """A connection that has sent these requests at once, and that reads nothing."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(LIMIT_S)
        connection.connect(split_address(address))
        connection.sendall(b"".join(b"GET %s HTTP/1.1\r\nHost: here\r\n\r\n" % path.encode() for path in paths))
        yield connection


def rest(connection: socket.socket, size: int | None = None) -> int:
    """The bytes that come until the end, or until there are so many."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while (size is None or count < size) and (part := connection.recv(1 << 16)):
            count += len(part)
    return count


def until(connection: socket.socket, end: bytes) -> None:
    seen = b""
    while not seen.endswith(end):
        seen += (part := connection.recv(1 << 16))
        if not part:
            raise ConnectionError(seen)


def posted(web: WebServer) -> socket.socket:
    return socket.create_connection(split_address(web.open("127.0.0.1:0", Stream(1).site())), LIMIT_S)


def test_each_address_of_one_server_has_its_own_routes_and_its_own_token(web: WebServer) -> None:
    open_one = web.open("127.0.0.1:0", metrics_site(Access(), {"/metrics": lambda: (b"figures", "text/plain")}))
    guarded = web.open("127.0.0.1:0", metrics_site(Access("t" * 40), {"/sd": lambda: (b"[]", "text/plain")}))
    page = open_page(web, "127.0.0.1:0", Access("p" * 40), list)
    assert get(f"http://{open_one}/metrics").body == b"figures"
    assert (get(f"http://{guarded}/sd").status, get(f"http://{guarded}/sd", "t" * 40).body) == (401, b"[]")
    assert get(f"http://{page}/state", "p" * 40).status == 200
    assert get(f"http://{page}/state", "t" * 40).status == get(f"http://{guarded}/sd", "p" * 40).status == 401
    elsewhere = [(open_one, "sd", ""), (guarded, "metrics", "t" * 40), (page, "metrics", "p" * 40)]
    assert {get(f"http://{at}/{path}", token or None).status for at, path, token in elsewhere} == {404}
    assert [thread.name for thread in threading.enumerate()].count("web") == 1


def test_a_client_that_takes_nothing_is_dropped() -> None:
    stream = Stream(chunks=10_000)
    with turned_server() as (web, loop), sent(web.open("127.0.0.1:0", stream.site()), "/stream") as slow:
        while not stream.over.wait(0.01):
            loop.turn(PATIENT_S / 2)
        assert 0 < rest(slow) < 10_000 * len(CHUNK)


def test_a_reply_may_take_longer_than_a_client() -> None:
    with turned_server() as (web, loop):
        stream = Stream(chunks=12, between=lambda: loop.pass_by(PATIENT_S / 4))
        with sent(web.open("127.0.0.1:0", stream.site()), "/quick", "/stream") as connection:
            assert rest(connection, 12 * len(CHUNK)) >= 12 * len(CHUNK)


def test_replies_that_run_end_with_the_server() -> None:
    with contextlib.ExitStack() as opened:
        with turned_server() as (web, _):
            connection = opened.enter_context(sent(web.open("127.0.0.1:0", Stream(10_000).site()), "/stream"))
            assert connection.recv(1)
        assert rest(connection) < 10_000 * len(CHUNK)
    assert "web" not in {thread.name for thread in threading.enumerate()}


@every("head", ["POST /quick HTTP/1.1", "POST /quick HTTP/1.1\r\nConnection: close", "POST /quick HTTP/1.0"])
def test_a_refused_client_that_still_sends_is_not_reset(head: str) -> None:
    part, parts = bytes(1 << 18), 20
    with turned_server() as (web, loop), posted(web) as connection:
        connection.sendall(f"{head}\r\nHost: here\r\nContent-Length: {len(part) * parts}\r\n\r\n".encode())
        connection.sendall(part)
        until(connection, b"allowed: GET\n")
        for _ in range(parts - 1):
            connection.sendall(part)
        loop.pass_by(PATIENT_S / 2)
        if head.endswith("1.1"):
            connection.sendall(b"GET /quick HTTP/1.1\r\nHost: here\r\n\r\n")
            until(connection, b"quick")
        else:
            assert connection.recv(1) == b""


def test_a_refused_client_that_never_ends_is_dropped() -> None:
    with turned_server() as (web, loop), posted(web) as connection:
        connection.sendall(b"POST /quick HTTP/1.1\r\nHost: here\r\nContent-Length: 9999999\r\n\r\n")
        until(connection, b"allowed: GET\n")
        connection.sendall(b"more")
        connection.settimeout(0.05)
        for _ in range(1000):  # the server may read `more` after a turn
            loop.turn(PATIENT_S)
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b""
                return
    raise AssertionError("the connection stays open")


def test_an_address_whose_routes_cannot_be_made_is_closed_and_the_others_stay(web: WebServer) -> None:
    broken = web.open("127.0.0.1:0", Site(lambda: 1 // 0, Access(), LIMITS))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConnectionRefusedError):  # From now or soon on: it is closed by the server's thread.
        while True:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError), sent(broken, "/") as connection:
                assert rest(connection) == 0
    other = web.open("127.0.0.1:0", Stream(1).site())
    assert get(f"http://{other}/quick").body == b"quick"
