"""The gRPC front: messages of the protocol in and out of the service, on the event loop."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.inference.protocol import grpc_form
from shardkeep.inference.server.access import Access
from shardkeep.inference.server.quiet_grpc import aio, grpc
from shardkeep.inference.server.service import Service

Handle = Callable[[bytes, Any], Awaitable[bytes]]


class GrpcFront:
    """A gRPC server on an address. To be made in the event loop."""

    def __init__(self, service: Service, address: str, access: Access, *, most_bytes: int) -> None:
        """Listens. Raises ConfigError where it cannot."""
        options = [
            ("grpc.so_reuseport", 0),  # else a second server on the port silently takes half of the calls
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", most_bytes),
            ("grpc.server_handshake_timeout_ms", 4000),
        ]
        interceptors = [] if access.token is None else [_TokenCheck(access.token)]
        self._server = aio.server(options=options, interceptors=interceptors)
        self._service, self._reader = service, grpc_form.RequestReader()
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.port = self._bind(address, access)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accepts no further call; running ones have `grace_s` seconds."""
        await self._server.stop(grace_s)

    def _bind(self, address: str, access: Access) -> int:
        try:
            if access.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                pair, ca = [(access.tls.key, access.tls.certificate)], access.tls.ca
                credentials = grpc.ssl_server_credentials(pair, ca, require_client_auth=True)
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"cannot listen on {address}: the port is in use or the host is not this machine's")
        return int(port)

    def _handlers(self) -> Any:
        calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            "ModelInfer": self._infer,
            "ModelMetadata": self._model,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ServerLive": self._live,
            "ServerReady": self._ready,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._guarded(call)) for name, call in calls.items()}
        return grpc.method_handlers_generic_handler(grpc_form.SERVICE, handlers)

    def _guarded(self, call: Callable[[bytes], Awaitable[bytes]]) -> Handle:
        """The call, with an error of the protocol for every exception."""

        async def handle(message: bytes, context: Any) -> bytes:
            try:
                return await call(message)
            except Exception as error:
                refusal = self._service.failed("grpc", error)
            await context.abort(getattr(grpc.StatusCode, refusal.status.grpc_code), str(refusal))
            raise AssertionError("abort raises")

        return handle

    async def _infer(self, message: bytes) -> bytes:
        request = self._reader.read(message)
        return grpc_form.write_reply(await self._service.infer("grpc", request), raw=request.raw)

    async def _model(self, message: bytes) -> bytes:
        return grpc_form.write_model(self._service.model(*grpc_form.read_model(message, metadata=True)))

    async def _model_ready(self, message: bytes) -> bytes:
        return grpc_form.write_model_ready(self._service.model_ready(*grpc_form.read_model(message, metadata=False)))

    async def _server_metadata(self, _message: bytes) -> bytes:
        return grpc_form.write_server(self._service.server())

    async def _live(self, _message: bytes) -> bytes:
        return grpc_form.write_live(True)

    async def _ready(self, _message: bytes) -> bytes:
        return grpc_form.write_ready(self._service.ready)


class _TokenCheck(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses calls without the token on their headers alone: their messages are not read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(_messages: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, Access.WHERE)

        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """The call's own handler, or one that refuses."""
        shown = [value for key, value in call.invocation_metadata or () if key == "authorization"]
        text = shown[0] if len(shown) == 1 else ""
        given = text.encode("utf-8", "replace") if isinstance(text, str) else text
        if not hmac.compare_digest(given, self._expected):
            return self._refusal
        return await continuation(call)
