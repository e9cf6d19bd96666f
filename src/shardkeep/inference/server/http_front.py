"""The HTTP front: paths of the protocol to calls of the service, by starlette and uvicorn, on the event loop.

Infer requests do not pass through starlette, whose routing and objects cost as much as the scores of a row.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shardkeep.inference.protocol import json_form
from shardkeep.inference.protocol.status import Refusal, Status, invalid
from shardkeep.inference.server.batcher import INLINE_BYTES
from shardkeep.inference.server.metrics import PrometheusMetrics
from shardkeep.inference.server.service import Service
from shardkeep.web.access import Access
from shardkeep.web.http import Listening
from shardkeep.web.site import Limits, listener_at

Call = Callable[[Request], Response]
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer$")
_HEADER_LENGTH = json_form.HEADER_LENGTH.lower().encode()
_ANY = 1 << 20
"""More connections than a process has file descriptors."""
LIMITS = Limits(connections=_ANY, per_s=_ANY, burst=_ANY, backlog=2048, head_bytes=64 << 10, wait_s=75.0)


class HttpFront:
    """An HTTP server on an address. To be made in the event loop."""

    def __init__(
        self, service: Service, listen: str, access: Access, metrics: PrometheusMetrics, *, most_bytes: int
    ) -> None:
        """Listens, and answers. Raises ConfigError where it cannot."""
        self._service, self._access, self._metrics, self._most_bytes = service, access, metrics, most_bytes
        self._reader = json_form.RequestReader()
        self._others = self._routes()
        listener, self.address = listener_at(listen, LIMITS.backlog)
        self._listening = Listening(listener, self._app, LIMITS, access.context())

    async def stop(self, grace_s: float) -> None:
        """Accepts no further connection; running requests have `grace_s` seconds."""
        await self._listening.stop(grace_s)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _INFER.match(scope["path"]) if scope["method"] == "POST" else None
        if path is None:
            await self._others(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_token(headers.get(b"authorization"))
            body = await self._body(headers, receive)
            content, json_length = await self._infer(path[1], path[2] or "", body, headers.get(_HEADER_LENGTH))
        except Exception as error:
            await self._failed(error)(scope, receive, send)
            return
        if json_length is None:
            shown = [(b"content-type", b"application/json")]
        else:
            shown = [(b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, b"%d" % json_length)]
        shown.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 200, "headers": shown})
        await send({"type": "http.response.body", "body": content})

    async def _infer(
        self, model: str, version: str, body: bytes, json_length: bytes | None
    ) -> tuple[bytes, int | None]:
        length = None if json_length is None else json_length.decode("latin-1")
        small = len(body) <= INLINE_BYTES
        read = partial(self._reader.read, body, length, model=model, version=version)
        asked = read() if small else await asyncio.to_thread(read)
        write = partial(json_form.write_reply, await self._service.infer("http", asked), asked)
        return write() if small else await asyncio.to_thread(write)

    def _routes(self) -> Starlette:
        """All calls except infer by POST."""
        model = "/v2/models/{model}"
        routes = []
        for prefix in (model, model + "/versions/{version}"):
            routes.append(Route(f"{prefix}/infer", self._guarded(self._model), methods=["POST"]))  # only refuses GET
            routes.append(Route(f"{prefix}/ready", self._guarded(self._model_ready)))
            routes.append(Route(prefix, self._guarded(self._model)))
        routes.append(Route("/v2/health/live", self._guarded(lambda _: _ready(True), opened=True)))
        routes.append(Route("/v2/health/ready", self._guarded(lambda _: _ready(self._service.ready), opened=True)))
        routes.append(Route("/v2", self._guarded(lambda _: _json(json_form.write_server(self._service.server())))))
        routes.append(Route("/metrics", self._guarded(self._scrape)))
        return Starlette(routes=routes)

    def _guarded(self, call: Call, *, opened: bool = False) -> Callable[[Request], Awaitable[Response]]:
        """The call behind the token, with an error of the protocol for every exception. `opened`: without a token."""

        async def handle(request: Request) -> Response:
            try:
                if not opened:
                    self._check_token(dict(request.scope["headers"]).get(b"authorization"))
                return call(request)
            except Exception as error:
                return self._failed(error)

        return handle

    def _check_token(self, header: bytes | None) -> None:
        if not self._access.admits(header):
            raise Refusal(Status.NO_TOKEN, Access.WHERE)

    def _failed(self, error: Exception) -> Response:
        refusal = self._service.failed("http", error)
        return _json(json_form.write_error(str(refusal)), refusal.status.http_code)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The body; of one that is too large, no more than is allowed is read."""
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise invalid("Content-Encoding: is not supported; allowed: identity")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most_bytes:
            raise self._too_large()
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise invalid("the connection broke before the end of the body")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> Refusal:
        return Refusal(Status.TOO_LARGE, f"the body is too large; allowed: {self._most_bytes} bytes (--max-message-mb)")

    def _model(self, request: Request) -> Response:
        return _json(json_form.write_model(self._service.model(**{"version": "", **request.path_params})))

    def _model_ready(self, request: Request) -> Response:
        return _ready(self._service.model_ready(**{"version": "", **request.path_params}))

    def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


def _ready(ready: bool) -> Response:
    return Response(b"", 200 if ready else 503)
