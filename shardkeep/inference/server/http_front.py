"""The HTTP front: paths of the protocol to calls of the service, by starlette and uvicorn, on the event loop.

Infer requests do not pass through starlette, whose routing and objects cost as much as the scores of a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping

from shardkeep.base.errors import UserError
from shardkeep.inference.protocol import json_form
from shardkeep.inference.protocol.status import Refusal, Status, invalid
from shardkeep.inference.server.access import Access
from shardkeep.inference.server.metrics import PrometheusMetrics
from shardkeep.inference.server.service import Service
from shardkeep.ps.control.grpc.listening import listening_socket

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as error:
    raise UserError(
        "HTTP needs starlette and uvicorn: pip install 'shardkeep[web]'; or serve with --http off"
    ) from error

Call = Callable[[Request], Awaitable[Response]]
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer$")
_HEADER_LENGTH = json_form.HEADER_LENGTH.lower().encode()
_BACKLOG = 2048
_MOST_HEAD_BYTES = 64 << 10


class HttpFront:
    """An HTTP server on an address. To be made in the event loop."""

    def __init__(
        self, service: Service, host: str, port: int, access: Access, metrics: PrometheusMetrics, *, most_bytes: int
    ) -> None:
        """Listens. Raises ConfigError where it cannot."""
        self._service, self._access, self._metrics, self._most_bytes = service, access, metrics, most_bytes
        self._reader = json_form.RequestReader()
        self._socket = listening_socket(host, port, backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._others = self._routes()
        config = uvicorn.Config(
            self._app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            server_header=False, timeout_keep_alive=75, proxy_headers=False, interface="asgi3",
        )  # fmt: skip
        config.load()
        config.ssl = access.ssl_context()
        self._server = _Server(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it answers."""
        self._running = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._running.done():
            await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Accepts no further connection; running requests have `grace_s` seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if self._running is not None:
            await self._running

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
        asked = self._reader.read(body, length, model=model, version=version)
        return json_form.write_reply(await self._service.infer("http", asked), asked)

    def _routes(self) -> Starlette:
        """All calls except infer by POST."""
        model = "/v2/models/{model}"
        routes = []
        for prefix in (model, model + "/versions/{version}"):
            routes.append(Route(f"{prefix}/infer", self._guarded(self._model), methods=["POST"]))  # only refuses GET
            routes.append(Route(f"{prefix}/ready", self._guarded(self._model_ready)))
            routes.append(Route(prefix, self._guarded(self._model)))
        routes.append(Route("/v2/health/live", self._guarded(self._live, opened=True)))
        routes.append(Route("/v2/health/ready", self._guarded(self._ready, opened=True)))
        routes.append(Route("/v2", self._guarded(self._server_metadata)))
        routes.append(Route("/metrics", self._guarded(self._scrape)))
        return Starlette(routes=routes)

    def _guarded(self, call: Call, *, opened: bool = False) -> Call:
        """The call behind the token, with an error of the protocol for every exception. `opened`: without a token."""

        async def handle(request: Request) -> Response:
            try:
                if not opened:
                    header = request.headers.get("authorization")
                    self._check_token(None if header is None else header.encode("latin-1"))
                return await call(request)
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

    async def _model(self, request: Request) -> Response:
        parts = request.path_params
        return _json(json_form.write_model(self._service.model(parts["model"], parts.get("version", ""))))

    async def _model_ready(self, request: Request) -> Response:
        parts = request.path_params
        return _ready(self._service.model_ready(parts["model"], parts.get("version", "")))

    async def _server_metadata(self, _request: Request) -> Response:
        return _json(json_form.write_server(self._service.server()))

    async def _live(self, _request: Request) -> Response:
        return _ready(True)

    async def _ready(self, _request: Request) -> Response:
        return _ready(self._service.ready)

    async def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Protocol(HttpToolsProtocol):
    """Bounds the bytes of a request before its body. They are read before the token is known."""

    _head_bytes = -1  # outside of a head

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of a request is too large; allowed: {_MOST_HEAD_BYTES} bytes.")


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


def _ready(ready: bool) -> Response:
    return Response(b"", 200 if ready else 503)
