"""The page's events: the whole state once, then only changes; a client that takes nothing is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import select
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.net.addresses import split_address
from shardkeep.page.of_job import LIMITS, open_page
from shardkeep.page.state import RunState
from shardkeep.page.streams import QUEUE_EVENTS, Streams, TooManyStreams
from shardkeep.web.access import Access
from tests.support.loop_clock import LIMIT_S, TurnedLoop, turned_server
from tests.support.seen_runs import NOON, append, progress

EVERY_S = 0.01


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: job\n")
    add(tmp_path, 0)
    return tmp_path


def add(run: Path, number: int) -> None:
    append(run / "metrics.jsonl", progress(number, 10 * number))


def streams(run: Path, **options: Any) -> Streams:
    return Streams([RunState(run, clock=lambda: NOON.timestamp() + 1)], every_s=EVERY_S, **options)


def in_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(check)
    def run_check(**fixtures: Any) -> None:
        asyncio.run(check(**fixtures))

    return run_check


async def event(events: AsyncGenerator[bytes, None]) -> tuple[str, dict[str, Any]]:
    """The next event, without comments."""
    async with asyncio.timeout(LIMIT_S):
        while (text := (await anext(events)).decode()).startswith(":"):
            pass
    head, data = text.removesuffix("\n\n").split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@in_loop
async def test_a_stream_begins_with_the_whole_state_and_goes_on_with_what_changed(run: Path) -> None:
    for number in range(1, 50):
        add(run, number)
    events = streams(run).events()
    name, whole = await event(events)
    rows = whole["runs"][0]["curves"]["training"]["rows"]
    assert name == "state" and whole["runs"][0]["overview"]["step"] == 490
    waiting = asyncio.ensure_future(anext(events))
    done, _ = await asyncio.wait({waiting}, timeout=20 * EVERY_S)
    assert not done, "nothing changes"
    add(run, 50)
    change = json.loads((await waiting).decode().split("data: ")[1])
    assert change["run"] == 0 and change["sections"]["overview"]["step"] == 500
    assert "config" not in change["sections"] and "tables" not in change["sections"]
    curve = change["sections"]["curves"]["training"]
    assert len(curve["rows"]) == 1 and curve["keep"] == len(rows) == 50
    assert curve["rows"][0][1] == 500
    await events.aclose()


@in_loop
async def test_a_client_that_takes_nothing_is_dropped_and_the_others_stay(run: Path) -> None:
    of_run = streams(run)
    slow, quick = of_run.events(), of_run.events()
    await event(slow)
    await event(quick)
    for number in range(1, QUEUE_EVENTS + 3):
        add(run, number)
        _, change = await event(quick)
        assert change["sections"]["overview"]["step"] == 10 * number
    taken = [piece async for piece in slow]
    assert len(taken) < QUEUE_EVENTS
    await quick.aclose()


@in_loop
async def test_no_more_streams_than_allowed_are_open_at_once(run: Path) -> None:
    of_run = streams(run, most=2)
    first, second, third = of_run.events(), of_run.events(), of_run.events()
    await asyncio.gather(event(first), event(second))
    with pytest.raises(TooManyStreams):
        await anext(third)
    await first.aclose()
    fourth = of_run.events()
    assert (await event(fourth))[0] == "state"
    await asyncio.gather(second.aclose(), fourth.aclose())


@in_loop
async def test_the_last_state_is_sent_when_the_job_ends(run: Path) -> None:
    of_run = Streams([RunState(run)], every_s=3600)
    events = of_run.events()
    await event(events)
    (run / "summary.json").write_text(json.dumps({"status": "completed", "steps": 90}))
    await of_run.close()
    _, change = await event(events)
    assert (change["sections"]["overview"]["state"], change["sections"]["overview"]["step"]) == ("completed", 90)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


# ---- connections: how many are accepted, and that those beyond wait instead of failing ----

LATER = 20
"""Connections beyond those that are accepted at once. All fit into the backlog."""


@pytest.fixture
def page() -> Iterator[tuple[str, TurnedLoop]]:
    with turned_server() as (web, loop):
        yield open_page(web, "127.0.0.1:0", Access("token"), list), loop


def connected(address: str, *, keep: bool = False) -> socket.socket:
    connection = socket.create_connection(split_address(address), timeout=LIMIT_S)
    request_on(connection, keep=keep)
    return connection


def request_on(connection: socket.socket, *, keep: bool) -> None:
    kept = b"keep-alive" if keep else b"close"
    connection.sendall(b"GET /ready HTTP/1.1\r\nHost: here\r\nConnection: %s\r\n\r\n" % kept)


def read_reply(connection: socket.socket) -> None:
    reply = b""
    while not reply.endswith(b"ready\n"):
        part = connection.recv(4096)
        assert part, reply
        reply += part
    assert reply.startswith(b"HTTP/1.1 200 ")


def with_reply(connections: list[socket.socket]) -> int:
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
