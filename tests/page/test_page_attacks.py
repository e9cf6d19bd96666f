"""Strangers on loopback: without the token, every address of the page but readiness is 401, and nobody can block it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.page.files import SERVED
from tests.support.cluster import Cluster
from tests.support.http_attacks import Streams, garbage, request, send, throw
from tests.support.pages import View, viewed
from tests.support.simulated_runs import Scene, write_simulated_run

pytestmark = pytest.mark.waits_for_processes

TARGETS = (
    "/",
    "/state",
    "/events",
    "/logs/server-0",
    "/logs/worker-0?run=0",
    "/static/page.js",
    "/static/",
    "/config.yaml",
    "/anything",
    "//",
    "*",
    "/ready/..",
    "/ready/../state",
    "/ready%2f..%2fstate",
    "/READY",
    "/state?ready",
    "/logs/../../../etc/passwd",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")
LIMIT_S = 90.0
MOST_GROWTH_BYTES = 150 << 20


@pytest.fixture
def view(cluster: Cluster, tmp_path: Path) -> Iterator[View]:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=1))
    (tmp_path / "secret-0.log").write_text("a secret beside the run")
    with viewed(cluster, run) as view:
        assert request(view.address.place, "/ready").status == 200
        yield view


def rss(view: View) -> int:
    return int(view.command.process.memory_info().rss)


def answers(view: View) -> None:
    """The page answers a viewer, soon."""
    began = time.monotonic()
    assert request(view.address.place, "/state", headers=view.address.bearer).status == 200
    assert time.monotonic() - began < LIMIT_S


def test_without_the_token_every_address_and_method_is_refused_but_readiness(view: View) -> None:
    place = view.address.place
    for target, method in itertools.product((*TARGETS, *(f"/static/{name}" for name in SERVED)), METHODS):
        reply = request(place, target, method=method)
        assert reply.status in (400, 401), (method, target)
        assert b"simulated" not in reply.body and b"rowwise_adagrad" not in reply.body
    ready = request(place, "/ready")
    assert (ready.status, ready.body) == (200, b"ready\n")


def test_a_wrong_token_or_one_in_another_place_is_refused(view: View) -> None:
    place, token = view.address.place, view.address.token
    wrong = (
        "",
        "x",
        token[:-1],
        token + "0",
        token.swapcase() if token.swapcase() != token else "y",
        "\xff",
        "0" * 5000,
    )
    for text in wrong:
        assert request(place, "/state", headers={"Authorization": f"Bearer {text}"}).status == 401, text[:80]
        if text.isascii() and text.isalnum():
            assert request(place, f"/?token={text}").status == 401
    elsewhere = (
        {"Authorization": token},
        {"Authorization": f"Basic {token}"},
        {"X-Token": token},
        {"Cookie": f"token={token}"},
        {"Cookie": f"shardkeep={token}"},
        {"Proxy-Authorization": f"Bearer {token}"},
    )
    for headers in elsewhere:
        assert request(place, "/state", headers=headers).status == 401, headers
    for target in (f"/state?token={token}", f"/events?token={token}", f"/logs/server-0?token={token}", f"/{token}"):
        assert request(place, target).status == 401, target
    assert request(place, "/state", method="POST", body=f"token={token}".encode()).status == 401


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(view: View) -> None:
    place, token = view.address.place, view.address.token
    reply = request(place, f"/?token={token}")
    assert reply.status == 303
    cookie = next(line for line in reply.head.splitlines() if line.lower().startswith("set-cookie:"))
    assert "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
    assert token not in next(line for line in reply.head.splitlines() if line.lower().startswith("location:"))
    value = cookie.split(":", 1)[1].split(";")[0].strip()
    assert request(place, "/", headers={"Cookie": value}).status == 200


def test_a_log_has_a_role_and_a_number_and_is_never_another_file(view: View) -> None:
    place, bearer = view.address.place, view.address.bearer
    assert request(place, "/logs/server-0", headers=bearer).status == 200
    for name in (
        "../../secret-0",
        "..%2f..%2fsecret-0",
        "%2e%2e/%2e%2e/secret-0",
        "server-0/../../../secret-0",
        "secret-0",
        "server-0.log",
        "server--1",
        "server-00000000000000000000",
        "server-0%00",
        "/etc/passwd",
        "server-\u0663",
        "server-0?run=-1",
        "server-0?run=1",
        "server-0?run=x",
        "",
        "-",
        "-0",
    ):
        reply = request(place, f"/logs/{name}", headers=bearer)
        assert reply.status in (400, 404), name
        assert b"secret" not in reply.body


def test_a_viewer_cannot_change_anything(view: View) -> None:
    for target, method in itertools.product(("/", "/state", "/logs/server-0"), ("POST", "PUT", "DELETE", "PATCH")):
        assert request(view.address.place, target, method=method, headers=view.address.bearer).status == 405


def test_long_heads_and_garbage_end_their_connection_alone_and_take_little_memory(view: View) -> None:
    place, before = view.address.place, rss(view)
    long = (
        b"GET /" + b"a" * (8 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * (8 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (1 << 20) + b"\r\n",
    )
    for sent in long:
        assert send(place, sent).status in (0, 400, 401, 414, 431)
    for sent in garbage(seed=1, count=60):
        throw(place, sent)
    answers(view)
    assert rss(view) - before < MOST_GROWTH_BYTES


def test_bodies_without_a_token_are_refused_and_not_kept(view: View) -> None:
    place, before = view.address.place, rss(view)
    for target in ("/", "/state", "/ready"):
        reply = request(place, target, method="POST", body=b"x" * (32 << 20))
        assert reply.status in (0, 200, 401, 405, 413), target
    answers(view)
    assert rss(view) - before < MOST_GROWTH_BYTES


@pytest.mark.slow
def test_connections_that_send_nothing_or_half_a_request_do_not_keep_others_out(view: View) -> None:
    place = view.address.place
    with contextlib.ExitStack() as stack:
        for number in range(500):
            connection = stack.enter_context(socket.create_connection(place, timeout=LIMIT_S))
            with contextlib.suppress(OSError):
                connection.sendall((b"", b"GET /", b"GET / HTTP/1.1\r\nA: b\r\n")[number % 3])
        for _ in range(5):
            answers(view)


@pytest.mark.slow
def test_500_streams_of_a_viewer_are_bounded_and_others_are_still_answered(view: View) -> None:
    place, before = view.address.place, rss(view)
    with Streams(place, "/events", view.address.bearer, count=500, slow=250) as streams:
        streams.read(5.0)
        answers(view)
        assert set(streams.statuses.values()) <= {200, 503}
        assert rss(view) - before < MOST_GROWTH_BYTES
    answers(view)


@pytest.mark.slow
def test_streams_without_the_token_are_closed_at_once(view: View) -> None:
    with Streams(view.address.place, "/events", {"Connection": "close"}, count=100) as streams:
        streams.read(14.0)  # at most 8 connections a second are accepted
        assert set(streams.statuses.values()) == {401}
        assert streams.closed == 100
    answers(view)
