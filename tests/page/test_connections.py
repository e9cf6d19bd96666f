"""How many connections the page accepts, and that those beyond wait instead of failing."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import pytest

from shardkeep.base.net.addresses import split_address
from shardkeep.page.of_job import LIMITS, open_page
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer

LIMIT_S = 60.0
LATER = 20
"""Connections beyond those that are accepted at once. All fit into the backlog."""


@pytest.fixture
def address() -> Iterator[str]:
    with contextlib.closing(WebServer()) as web:
        yield open_page(web, "127.0.0.1:0", Access("token"), list)


def connected(address: str, *, keep: bool = False) -> socket.socket:
    """A connection that has sent a request."""
    connection = socket.create_connection(split_address(address), timeout=LIMIT_S)
    request_on(connection, keep=keep)
    return connection


def request_on(connection: socket.socket, *, keep: bool) -> None:
    connection.sendall(
        b"GET /ready HTTP/1.1\r\nHost: here\r\nConnection: %s\r\n\r\n" % (b"keep-alive" if keep else b"close")
    )


def read_reply(connection: socket.socket) -> None:
    """Waits for a whole reply."""
    reply = b""
    while not reply.endswith(b"ready\n"):
        part = connection.recv(4096)
        assert part, reply
        reply += part
    assert reply.startswith(b"HTTP/1.1 200 ")


def has_reply(connection: socket.socket) -> bool:
    """Whether a reply is there now."""
    return bool(select.select([connection], [], [], 0.0)[0])


def test_a_burst_is_accepted_at_once_and_the_others_wait_for_their_turn(address: str) -> None:
    began, times = time.monotonic(), list[float]()
    with contextlib.ExitStack() as opened:
        waiting = [opened.enter_context(connected(address)) for _ in range(LIMITS.burst + LATER)]
        while waiting:
            assert time.monotonic() - began < LIMIT_S, f"{len(waiting)} connections have no reply"
            for each in select.select(waiting, [], [], 1.0)[0]:
                read_reply(each)
                waiting.remove(each)
                times.append(time.monotonic() - began)
    early = [number for number, time_s in enumerate(times, 1) if number > LIMITS.burst + 2 + LIMITS.per_s * time_s]
    assert early == [], times
    assert times[LIMITS.burst - 1] < times[-1] - (LATER - 4) / LIMITS.per_s, times


def test_who_is_connected_gets_replies_while_others_wait(address: str) -> None:
    with contextlib.ExitStack() as opened:
        viewer = opened.enter_context(connected(address, keep=True))
        read_reply(viewer)
        others = [opened.enter_context(connected(address)) for _ in range(LIMITS.burst + LATER)]
        request_on(viewer, keep=True)
        read_reply(viewer)
        assert not has_reply(others[-1])
