"""Routes: GET requests by path, for people and programs that show a token. Only readiness needs none."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from http.cookies import CookieError, SimpleCookie

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from shardkeep.base.logs.log import EventLog
from shardkeep.web.access import Access

_log = EventLog("web")
READY = "/ready"
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
Call = Callable[[Request], Response | Awaitable[Response]]


def reply_of(page: Callable[[], tuple[bytes, str]]) -> Call:
    """Replies with a body and its type."""

    def call(_request: Request) -> Response:
        body, content = page()
        return Response(body, media_type=content)

    return call


class Routes:
    """An ASGI application.

    Args:
        access: Who gets replies.
        calls: What they get, by path. A path that ends with a slash has all paths below it.
        headers: Of every reply.
        cookie: Where browsers keep the token that they show in the address of `/`; empty = nowhere.
        refusal: Text for those without the token.
        close: Ends the replies that have no end of their own.
    """

    def __init__(
        self,
        access: Access,
        calls: Mapping[str, Call],
        *,
        headers: Mapping[str, str],
        cookie: str = "",
        refusal: str = f"{Access.WHERE}\n",
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._access, self._calls, self._cookie, self._refusal = access, calls, cookie, refusal
        self._headers = {**HEADERS, **headers}
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        for name, value in self._headers.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path == READY:
            return PlainTextResponse("ready\n")
        if self._cookie and path == "/" and "token" in request.query_params:
            return self._enter(request.query_params["token"])
        if not self._admits(request):
            return self._refused()
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("allowed: GET\n", 405, {"allow": "GET"})
        call = self._calls.get(path) or self._calls.get(path[: path.find("/", 1) + 1])
        if call is None:
            return PlainTextResponse(f"served here: {', '.join([*self._calls, READY])}\n", 404)
        try:
            reply = call(request)
            return reply if isinstance(reply, Response) else await reply
        except Exception as error:  # what cannot be read must not end the server
            _log.warning("a request failed", path=path, why=f"{type(error).__name__}: {error}")
            return PlainTextResponse("the figures cannot be read; the log says why\n", 500)

    def _enter(self, token: str) -> Response:
        """Takes the token out of the address, which a browser shows and keeps, into a cookie."""
        if not self._is_token(token):
            return self._refused()
        response = RedirectResponse("/", 303)
        secure = self._access.tls is not None
        response.set_cookie(self._cookie, token, httponly=True, samesite="strict", secure=secure)
        return response

    def _admits(self, request: Request) -> bool:
        if self._access.admits(request.headers.get("authorization", "").encode("latin-1")):
            return True
        cookies: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(request.headers.get("cookie", ""))
        found = cookies.get(self._cookie)
        return found is not None and self._is_token(found.value)

    def _is_token(self, text: str) -> bool:
        return self._access.admits(b"Bearer " + text.encode("utf-8", "replace"))

    def _refused(self) -> Response:
        return PlainTextResponse(self._refusal, 401, {"www-authenticate": "Bearer", "connection": "close"})
