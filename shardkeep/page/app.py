"""The page's HTTP: files, state, events, logs. Everything but readiness wants the view token."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from shardkeep.page.files import SERVED, text_of
from shardkeep.page.records import ROLES
from shardkeep.page.streams import Streams, TooManyStreams

SEND_S = 10.0
"""A client that takes nothing for so many seconds is dropped."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
NO_TOKEN = (
    "This page needs its token. Open the whole address that the job printed, with ?token=..., or send the header\n"
    "Authorization: Bearer TOKEN.\n"
)
ABORT = "shardkeep.abort"
"""Key of the state in the scope: closes the connection at once."""

Handler = Callable[[Request], Awaitable[Response]]


class PageApp:
    """An ASGI application. `token`: the view token that each request shows."""

    def __init__(self, streams: Streams, token: str, *, secure: bool = False) -> None:
        self._streams, self._token, self._secure = streams, token, secure
        self._cookie = f"shardkeep-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if scope["path"] == "/events" and self._admits(request) and request.method == "GET":
            await self._events(scope, receive, send)
            return
        response = await self._answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path == "/ready":
            return PlainTextResponse("ready\n")
        if path == "/" and "token" in request.query_params:
            return self._enter(request)
        if not self._admits(request):
            return _refused()
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("allowed: GET\n", 405, {"allow": "GET"})
        if path == "/":
            return Response(text_of("index.html"), media_type="text/html")
        if path == "/state":
            return Response(await self._streams.state(), media_type="application/json")
        name = path.removeprefix("/static/")
        if path.startswith("/static/") and name in SERVED:
            return Response(text_of(name), media_type=SERVED[name], headers={"cache-control": "private, max-age=300"})
        if path.startswith("/logs/"):
            return await self._log(path.removeprefix("/logs/"), request)
        return PlainTextResponse("there is no such page\n", 404)

    def _enter(self, request: Request) -> Response:
        """Takes the token out of the address, which a browser shows and keeps, into a cookie."""
        if not self._is_token(request.query_params["token"]):
            return _refused()
        response = RedirectResponse("/", 303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", secure=self._secure)
        return response

    def _admits(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(token.strip())
        cookies: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(request.headers.get("cookie", ""))
        found = cookies.get(self._cookie)
        return found is not None and self._is_token(found.value)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token.encode())

    async def _log(self, name: str, request: Request) -> Response:
        role, _, index = name.rpartition("-")
        chosen = parse_qs(request.url.query).get("run", ["0"])[0]
        runs = self._streams.runs
        if not (index.isascii() and index.isdecimal() and len(index) < 6 and role in ROLES):
            return PlainTextResponse("a log is named ROLE-INDEX\n", 404)
        if not (chosen.isascii() and chosen.isdecimal() and len(chosen) < 4 and int(chosen) < len(runs)):
            return PlainTextResponse("there is no such run\n", 404)
        text = await asyncio.to_thread(runs[int(chosen)].log, role, int(index))
        if text is None:
            return PlainTextResponse("there is no such log\n", 404)
        return PlainTextResponse(text)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the client leaves, is too slow, or the page ends."""
        events = self._streams.events()
        try:
            first = await anext(events)
        except TooManyStreams:
            refusal = PlainTextResponse(
                "too many streams are open; try again later\n", 503, {"retry-after": "10", "connection": "close"}
            )
            await refusal(scope, receive, send)
            return
        headers = {**HEADERS, "content-type": "text/event-stream", "x-accel-buffering": "no"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        gone = asyncio.create_task(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            event: bytes | None = first
            while event is not None and not gone.done():
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                following = asyncio.ensure_future(anext(events, None))
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                event = following.result() if following.done() else None
                if not following.done():
                    following.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await following
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            scope["state"][ABORT]()
        finally:
            gone.cancel()
            await events.aclose()


def _refused() -> Response:
    return PlainTextResponse(NO_TOKEN, 401, {"www-authenticate": "Bearer", "connection": "close"})


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
