"""The page's events: the whole state once, then only changes; a client that takes nothing is dropped."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.state import RunState
from shardkeep.page.streams import QUEUE_EVENTS, Streams, TooManyStreams
from tests.support.seen_runs import NOON, append, progress

EVERY_S = 0.01
LIMIT_S = 90.0


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
    """Runs a test in an event loop of its own."""

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
