"""The page's routes: files, state, events, logs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from shardkeep.page.files import SERVED, text_of
from shardkeep.page.state import RunState
from shardkeep.page.streams import Streams, TooManyStreams
from shardkeep.records.telemetry import ROLES
from shardkeep.web.access import Access
from shardkeep.web.routes import Call, Routes

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
NO_TOKEN = (
    "This page needs its token. Open the whole address that the job printed, with ?token=..., or send the header\n"
    "Authorization: Bearer TOKEN.\n"
)


def page_app(runs: Sequence[RunState], access: Access) -> Routes:
    """The page of some runs. `access`: with the view token that each request shows."""
    pages = _Pages(Streams(runs))
    calls: dict[str, Call] = {
        "/": pages.index,
        "/state": pages.state,
        "/events": pages.events,
        "/static/": pages.static,
        "/logs/": pages.log,
    }
    cookie = f"shardkeep-{hashlib.sha256((access.token or '').encode()).hexdigest()[:12]}"
    return Routes(access, calls, headers=HEADERS, cookie=cookie, refusal=NO_TOKEN, close=pages.streams.close)


class _Pages:
    """What each path answers."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def index(self, _request: Request) -> Response:
        return Response(text_of("index.html"), media_type="text/html")

    async def state(self, _request: Request) -> Response:
        return Response(await self.streams.state(), media_type="application/json")

    def static(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/static/")
        if name not in SERVED:
            return _missing("there is no such page")
        return Response(text_of(name), media_type=SERVED[name], headers={"cache-control": "private, max-age=300"})

    async def log(self, request: Request) -> Response:
        role, _, index = request.url.path.removeprefix("/logs/").rpartition("-")
        chosen = request.query_params.get("run", "0")
        runs = self.streams.runs
        if not (index.isascii() and index.isdecimal() and len(index) < 6 and role in ROLES):
            return _missing("a log is named ROLE-INDEX")
        if not (chosen.isascii() and chosen.isdecimal() and len(chosen) < 4 and int(chosen) < len(runs)):
            return _missing("there is no such run")
        text = await asyncio.to_thread(runs[int(chosen)].log, role, int(index))
        return _missing("there is no such log") if text is None else PlainTextResponse(text)

    async def events(self, request: Request) -> Response:
        """Events until the client leaves, is too slow, or the page ends."""
        if request.method != "GET":
            return _missing("there is no such page")
        events = self.streams.events()
        try:
            first = await anext(events)
        except TooManyStreams:
            headers = {"retry-after": "10", "connection": "close"}
            return PlainTextResponse("too many streams are open; try again later\n", 503, headers)
        headers = {"content-type": "text/event-stream", "x-accel-buffering": "no"}
        return StreamingResponse(_from(first, events), headers=headers)


async def _from(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


def _missing(text: str) -> Response:
    return PlainTextResponse(f"{text}\n", 404)
