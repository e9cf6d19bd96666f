"""Who gets replies of the endpoint of metrics, what garbage gets, and what slow clients cost."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.net.addresses import split_address
from shardkeep.metrics.discovery import targets
from shardkeep.metrics.serving import LIMITS, member_listen, metrics_site
from shardkeep.run.folder import RunFolder
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.tls import read_tls
from shardkeep.trust.tokens import keep_token
from shardkeep.trust.view import put_view_token, shows_token, view_token
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer
from shardkeep.web.site import Limits, shown_url
from tests.support.cases import every
from tests.support.http_get import get
from tests.support.loop_clock import turned_server

TOKEN = view_token("job")
MANY = replace(LIMITS, per_s=1e6, burst=1000)
"""Limits of tests that make many requests: a process accepts five connections per second."""
PAGES = {"/metrics": lambda: (b"figures", "text/plain"), "/broken": lambda: (str(1 // 0).encode(), "text/plain")}


class Endpoint:
    """The metrics of a process that has no others, served by a web server of its own."""

    def __init__(self, listen: str, access: Access, limits: Limits = MANY, web: WebServer | None = None) -> None:
        self._web = web or WebServer()
        self.address = self._web.open(listen, replace(metrics_site(access, PAGES), limits=limits))
        self.url = shown_url(self.address, secure=access.tls is not None)
        self.close = self._web.close


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with contextlib.closing(Endpoint("127.0.0.1:0", Access(TOKEN))) as endpoint:
        yield endpoint


def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(split_address(endpoint.address), timeout=90)


def said(connection: socket.socket, request: bytes) -> bytes:
    """All that the endpoint replies until it hangs up."""
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(request)
        reply = b""
        while part := connection.recv(4096):
            reply += part
    return reply


def test_without_the_view_token_there_is_nothing(endpoint: Endpoint) -> None:
    tokens = ("", "job", TOKEN[:-1], TOKEN + "0", "\u00e4")
    headers = [b"", *(f"Authorization: Bearer {token}\r\n".encode() for token in tokens)]
    paths = ("/metrics", "/sd", "/", "/ready/x", "//metrics", "/ready/../metrics")
    for path, header in product(paths, headers):
        reply = said(connected(endpoint), f"GET {path} HTTP/1.1\r\n".encode() + header + b"\r\n")
        assert reply.split(b"\r\n")[0] in (b"HTTP/1.1 401 Unauthorized", b"HTTP/1.1 400 Bad Request"), (path, header)
        assert b"figures" not in reply


def test_with_the_view_token_there_are_the_pages_and_readiness_needs_none(endpoint: Endpoint) -> None:
    assert get(f"{endpoint.url}/metrics", TOKEN).body == b"figures"
    assert get(f"{endpoint.url}/metrics?x=1", TOKEN).body == b"figures"
    assert get(f"{endpoint.url}/nowhere", TOKEN).status == 404
    assert get(f"{endpoint.url}/metrics", TOKEN, method="POST").status == 405
    assert get(f"{endpoint.url}/broken", TOKEN).status == 500
    assert get(f"{endpoint.url}/metrics", TOKEN).status == 200, "an error is not the end"
    assert get(f"{endpoint.url}/ready").body == b"ready\n"


def test_garbage_is_answered_by_an_error(endpoint: Endpoint) -> None:
    tls, too_long = b"\x16\x03\x01\x02\x00" * 50, b"A" * (4 * LIMITS.head_bytes)
    lines = (b"GET /metrics", b"GET /metrics HTTP/1.1 x", b"GET /metrics SPDY/3")
    for sent in (tls + b"\r\n\r\n", too_long, *(line + b"\r\n\r\n" for line in lines)):
        reply = said(connected(endpoint), sent)
        assert reply[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401", b""), (
            "the kernel may drop it when unread bytes are left"
        )
        assert get(f"{endpoint.url}/ready").status == 200


def test_connections_that_say_nothing_or_too_little_keep_nobody_out() -> None:
    with turned_server() as (web, loop), contextlib.ExitStack() as slow:
        endpoint = Endpoint("127.0.0.1:0", Access(TOKEN), LIMITS, web)
        silent = []
        for _ in range(LIMITS.connections + 2):
            silent.append(slow.enter_context(connected(endpoint)))
            loop.turn(1 / LIMITS.per_s)
        replying = slow.enter_context(connected(endpoint))
        replying.sendall(f"GET /metrics HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        loop.turn(1 / LIMITS.per_s)
        assert replying.recv(4096).startswith(b"HTTP/1.1 200")
        assert silent[0].recv(1) == b"", "the oldest is closed for a new one, before its time is over"
        silent[-2].sendall(b"\r\n\r\n")
        silent[-1].sendall(b"GET /ready HTTP/1.1\r\n")
        silent[-1].setblocking(False)
        loop.settle()
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        loop.turn(LIMITS.wait_s)
        assert [one.recv(1) for one in silent[-2:]] == [b"", b""], "their time is over"


def test_an_endpoint_that_is_closed_leaves_its_port_and_a_port_that_is_taken_is_a_config_error() -> None:
    endpoint = Endpoint("127.0.0.1:0", Access(TOKEN))
    open_one = connected(endpoint)
    endpoint.close()
    endpoint.close()
    with open_one, contextlib.suppress(ConnectionResetError):  # if the endpoint had not accepted it yet
        assert open_one.recv(1) == b""
    with contextlib.closing(Endpoint(endpoint.address, Access(TOKEN))) as again:
        assert get(f"{again.url}/ready").status == 200
        with pytest.raises(ConfigError, match=f"cannot listen on {endpoint.address}: Address already in use"):
            Endpoint(endpoint.address, Access(TOKEN))


def test_with_tls_only_peers_of_the_authority_get_replies(tmp_path: Path) -> None:
    ours, theirs = (make_certs(tmp_path / name, [LOCAL], days=1)[0] for name in ("ours", "theirs"))
    with contextlib.closing(Endpoint("127.0.0.1:0", Access(TOKEN, read_tls(ours)))) as endpoint:
        assert endpoint.url.startswith("https://")
        assert get(f"{endpoint.url}/metrics", TOKEN, tls=client_context(ours)).body == b"figures"
        stranger, nobody = client_context(theirs), ssl.create_default_context(cafile=ours / "ca.pem")
        stranger.load_verify_locations(ours / "ca.pem")
        for context in (stranger, nobody):
            with pytest.raises(OSError):
                get(f"{endpoint.url}/ready", tls=context)


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


# ---- the targets of a job for Prometheus, and the view token's file ----


def test_each_process_is_a_target_once_with_its_scheme() -> None:
    body, content = targets(
        ["http://127.0.0.1:1/metrics", "https://[::1]:2/metrics", "http://127.0.0.1:1/metrics"], job="demo", run="first"
    )
    groups = json.loads(body)
    assert [group["targets"] for group in groups] == [["127.0.0.1:1"], ["[::1]:2"]]
    assert [group["labels"]["__scheme__"] for group in groups] == ["http", "https"]
    assert {group["labels"]["run"] for group in groups} == {"first"}
    assert content == "application/json"


@every(
    ("coordinator", "own_host", "expected"),
    [
        ("127.0.0.1:9100", "10.9.0.2", "127.0.0.1:0"),
        ("localhost:9100", "127.0.0.1", "127.0.0.1:0"),
        ("10.9.0.1:9100", "10.9.0.2", "10.9.0.2:0"),
        ("10.9.0.1:9100", "127.0.0.1", "10.9.0.1:0"),
        ("0.0.0.0:9100", "10.9.0.2", "10.9.0.2:0"),
        ("[fd00::1]:9100", "fd00::2", "[fd00::2]:0"),
    ],
)
def test_a_member_listens_where_the_coordinator_s_scraper_reaches_it(
    coordinator: str, own_host: str, expected: str
) -> None:
    assert member_listen(coordinator, own_host) == expected


def test_the_view_token_is_another_one_in_a_private_file_and_goes_with_the_job_s(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    token = keep_token(folder.path)
    path, view = put_view_token(folder.path, token), view_token(token)
    assert path.read_text() == view != token and tmp_path not in path.parents
    assert path.stat().st_mode & 0o777 == 0o600
    folder.forget_token()
    assert not path.exists()
    assert shows_token(f"Bearer {view}".encode(), view)
    for header, wanted in ((f"Bearer {view}".encode(), token), (f"Bearer {token}".encode(), view), (None, view)):
        assert not shows_token(header, wanted)
    assert view_token("a" * 64) != view_token("a" * 63 + "b")
