"""Strangers on loopback: without the token, every address of the page but readiness is 401, and nobody can block it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardkeep.page.files import SERVED
from tests.support.http_attacks import garbage, request, send, throw
from tests.support.pages import PageAddress, viewed
from tests.support.simulated_runs import Scene, write_simulated_run

TARGETS = (
    "/", "/state", "/events", "/logs/server-0", "/logs/worker-0?run=0", "/static/", "/config.yaml", "/anything", "//",
    "*", "/ready/..", "/ready/../state", "/ready%2f..%2fstate", "/READY", "/state?ready", "/logs/../../../etc/passwd",
    *(f"/static/{name}" for name in SERVED),
)  # fmt: skip
NO_LOGS = (
    "../../secret-0", "..%2f..%2fsecret-0", "%2e%2e/%2e%2e/secret-0", "server-0/../../../secret-0", "secret-0",
    "server-0.log", "server--1", "server-00000000000000000000", "server-0%00", "/etc/passwd", "server-\u0663",
    "server-0?run=-1", "server-0?run=1", "server-0?run=x", "", "-", "-0",
)  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageAddress]:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=1, steps=600))
    (tmp_path / "secret-0.log").write_text("a secret beside the run")
    with viewed(run) as address:
        assert request(address.place, "/ready").status == 200
        yield address


@contextlib.contextmanager
def unharmed(page: PageAddress) -> Iterator[None]:
    """After it the page answers a viewer soon, and this process, client and server, has not grown much."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    began = time.monotonic()
    assert request(page.place, "/state", headers=page.bearer).status == 200
    assert time.monotonic() - began < 90.0
    assert process.memory_info().rss - before < (60 << 20)


def test_without_the_token_every_address_and_method_is_refused_but_readiness(page: PageAddress) -> None:
    methods = ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")
    some = ("/", "/state", "/events", "/logs/server-0", "/static/page.js", "/anything")
    for target, method in (*((target, "GET") for target in TARGETS), *itertools.product(some, methods)):
        reply = request(page.place, target, method=method)
        assert reply.status in (400, 401), (method, target)
        assert b"simulated" not in reply.body and b"rowwise_adagrad" not in reply.body
    ready = request(page.place, "/ready")
    assert (ready.status, ready.body) == (200, b"ready\n")


def test_a_wrong_token_or_one_in_another_place_is_refused(page: PageAddress) -> None:
    place, token = page.place, page.token
    for text in ("", "x", token[:-1], token + "0", token.upper(), "\xff", "0" * 5000):
        assert request(place, "/state", headers={"Authorization": f"Bearer {text}"}).status == 401, text[:80]
        if text.isascii() and text.isalnum():
            assert request(place, f"/?token={text}").status == 401
    for name, value in (
        ("Authorization", token),
        ("Authorization", f"Basic {token}"),
        ("X-Token", token),
        ("Cookie", f"token={token}"),
        ("Cookie", f"shardkeep={token}"),
        ("Proxy-Authorization", f"Bearer {token}"),
    ):
        assert request(place, "/state", headers={name: value}).status == 401, (name, value)
    for target in (f"/state?token={token}", f"/events?token={token}", f"/logs/server-0?token={token}", f"/{token}"):
        assert request(place, target).status == 401, target
    assert request(place, "/state", method="POST", body=f"token={token}".encode()).status == 401


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(page: PageAddress) -> None:
    reply = request(page.place, f"/?token={page.token}")
    assert reply.status == 303
    cookie = next(line for line in reply.head.splitlines() if line.lower().startswith("set-cookie:"))
    assert "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
    assert page.token not in next(line for line in reply.head.splitlines() if line.lower().startswith("location:"))
    value = cookie.split(":", 1)[1].split(";")[0].strip()
    shown = request(page.place, "/", headers={"Cookie": value})
    assert shown.status == 200 and "frame-ancestors 'none'" in shown.head and "nosniff" in shown.head
    assert b"<script>" not in shown.body and b"style=" not in shown.body


def test_a_viewer_reads_logs_by_role_and_number_never_another_file_and_cannot_change_anything(
    page: PageAddress,
) -> None:
    assert request(page.place, "/logs/server-0", headers=page.bearer).status == 200
    for name in NO_LOGS:
        reply = request(page.place, f"/logs/{name}", headers=page.bearer)
        assert reply.status in (400, 404), name
        assert b"secret" not in reply.body
    for target, method in itertools.product(("/", "/state", "/logs/server-0"), ("POST", "PUT", "DELETE", "PATCH")):
        assert request(page.place, target, method=method, headers=page.bearer).status == 405


def test_long_heads_and_garbage_end_their_connection_alone_and_are_not_kept(page: PageAddress) -> None:
    long = (
        b"GET /" + b"a" * (8 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * (8 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (1 << 20) + b"\r\n",
    )
    body = b"x" * (32 << 20)
    with unharmed(page):
        for sent in long:
            assert send(page.place, sent).status in (0, 400, 401, 414, 431)
        for target in ("/", "/state", "/ready"):
            reply = request(page.place, target, method="POST", body=body)
            assert reply.status in (0, 200, 401, 405, 413), target
        for sent in garbage(seed=1, count=60):
            throw(page.place, sent)
