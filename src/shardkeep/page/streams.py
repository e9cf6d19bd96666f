"""Streams: sends each client the state of the runs once, then only what changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from shardkeep.page.comparison import compared
from shardkeep.page.records import Json
from shardkeep.page.state import RunState
from shardkeep.records.json_text import to_json

EVERY_S = 1.0
HEARTBEAT_S = 15.0
MOST_STREAMS = 32
QUEUE_EVENTS = 16
"""A client that has not taken so many events is dropped; it connects again and gets the whole state."""
CURVES = ("training", "evaluation")


class TooManyStreams(Exception):
    """As many clients as are allowed are connected."""


class Streams:
    """The state of some runs, for any number of requests and for up to `most` streams. Belongs to one event loop.

    The folders are read once per `every_s`, and only while somebody looks."""

    def __init__(self, runs: Sequence[RunState], *, every_s: float = EVERY_S, most: int = MOST_STREAMS) -> None:
        self.runs = list(runs)
        self._every_s, self._most = every_s, most
        self._sections: list[Json] = []
        self._texts: list[dict[str, str]] = []
        self._whole: bytes | None = None
        self._read_at = -1e9
        self._reading = asyncio.Lock()
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._follower: asyncio.Task[None] | None = None

    async def state(self) -> bytes:
        """The whole state as JSON, at most `every_s` old."""
        if not self._follower or not self._sections:
            await self._refresh()
        if self._whole is None:
            named = [{"name": run.name, **one} for run, one in zip(self.runs, self._sections, strict=True)]
            between = compared(self.runs, self._sections)
            self._whole = to_json({"at": time.time(), "runs": named, "compared": between}).encode()
        return self._whole

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `state` once, then `change`; a comment when nothing has changed for a while.

        Raises TooManyStreams before the first event."""
        if len(self._queues) >= self._most:
            raise TooManyStreams
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_EVENTS)
        self._queues.add(queue)
        try:
            state = await self.state()
            while not queue.empty():  # `state` has these changes
                queue.get_nowait()
            if self._follower is None:
                self._follower = asyncio.create_task(self._follow())
            yield _event("state", state)
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    event = b": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._queues.discard(queue)

    async def close(self) -> None:
        """Sends the last changes and ends all streams."""
        with contextlib.suppress(Exception):
            await self._refresh(at_once=True)
        for queue in set(self._queues):
            self._end(queue)
        if self._follower is not None:
            self._follower.cancel()

    async def _follow(self) -> None:
        """Reads the folders while there are clients."""
        while self._queues:
            await asyncio.sleep(self._every_s)
            with contextlib.suppress(Exception):  # the folder is gone, or has a record of a form that nobody knows
                await self._refresh()
        self._follower = None

    async def _refresh(self, *, at_once: bool = False) -> None:
        async with self._reading:
            if not at_once and self._sections and time.monotonic() - self._read_at < 0.9 * self._every_s:
                return
            found = await asyncio.to_thread(lambda: [run.sections() for run in self.runs])
            texts = [{name: to_json(value) for name, value in one.items()} for one in found]
            between = compared(self.runs, found)
            for at, (sections, old) in enumerate(zip(found, self._texts, strict=False)):
                changed = {name: value for name, value in sections.items() if texts[at][name] != old.get(name)}
                if changed:
                    if "curves" in changed:
                        changed["curves"] = _added(self._sections[at]["curves"], sections["curves"])
                    news = {"at": time.time(), "run": at, "sections": changed, "compared": between}
                    self._send(_event("change", to_json(news).encode()))
            self._sections, self._texts, self._read_at = found, texts, time.monotonic()
            self._whole = None

    def _send(self, event: bytes) -> None:
        for queue in set(self._queues):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Ends a stream, with what it has not taken yet if there is room for the end."""
        self._queues.discard(queue)
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)


def _added(before: Json, now: Json) -> Json:
    """Curves with only the rows that were added: `keep` rows of those before stay."""
    changed = dict(now)
    for name in CURVES:
        old, new = before[name]["rows"], now[name]["rows"]
        keep = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        changed[name] = {**now[name], "rows": new[keep:], "keep": keep}
    return changed


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
