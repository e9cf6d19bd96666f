"""How many connections the page accepts, and that those beyond wait instead of failing."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from shardkeep.base.net.addresses import split_address
from shardkeep.page.of_job import LIMITS, open_page
from shardkeep.web.access import Access
from tests.support.loop_clock import LIMIT_S, TurnedLoop, turned_server

LATER = 20
"""Connections beyond those that are accepted at once. All fit into the backlog."""


@pytest.fixture
def page() -> Iterator[tuple[str, TurnedLoop]]:
    with turned_server() as (web, loop):
        yield open_page(web, "127.0.0.1:0", Access("token"), list), loop


def connected(address: str, *, keep: bool = False) -> socket.socket:
    """A connection that has sent a request."""
    connection = socket.create_connection(split_address(address), timeout=LIMIT_S)
    request_on(connection, keep=keep)
    return connection


def request_on(connection: socket.socket, *, keep: bool) -> None:
    kept = b"keep-alive" if keep else b"close"
    connection.sendall(b"GET /ready HTTP/1.1\r\nHost: here\r\nConnection: %s\r\n\r\n" % kept)


def read_reply(connection: socket.socket) -> None:
    """Waits for a whole reply."""
    reply = b""
    while not reply.endswith(b"ready\n"):
        part = connection.recv(4096)
        assert part, reply
        reply += part
    assert reply.startswith(b"HTTP/1.1 200 ")


def with_reply(connections: list[socket.socket]) -> int:
    """How many have a reply now."""
    return len(select.select(connections, [], [], 0.0)[0])


def test_a_burst_is_accepted_at_once_and_the_others_in_turn(page: tuple[str, TurnedLoop]) -> None:
    address, loop = page
    with contextlib.ExitStack() as opened:
        waiting = [opened.enter_context(connected(address)) for _ in range(LIMITS.burst + LATER)]
        for each in waiting[: LIMITS.burst]:
            read_reply(each)
        later = waiting[LIMITS.burst :]
        loop.settle()
        extra = with_reply(later)
        assert extra <= 1, "the burst, and the one that was accepted before the server rested"
        for count in range(1, LATER - extra + 1):
            loop.turn(1 / LIMITS.per_s)
            assert with_reply(later) == count + extra
        for each in later:
            read_reply(each)


def test_who_is_connected_gets_replies_while_others_wait(page: tuple[str, TurnedLoop]) -> None:
    address, _ = page
    with contextlib.ExitStack() as opened:
        viewer = opened.enter_context(connected(address, keep=True))
        read_reply(viewer)
        others = [opened.enter_context(connected(address)) for _ in range(LIMITS.burst + LATER)]
        request_on(viewer, keep=True)
        read_reply(viewer)
        assert with_reply(others[-1:]) == 0
