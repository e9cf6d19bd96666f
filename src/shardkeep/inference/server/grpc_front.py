"""The gRPC front: messages of the protocol in and out of the service, by a thread for each running call.

grpc's asyncio server takes 250 µs of CPU for an empty call and hands calls over one by one, so that batches stay small;
its threads take 150."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shardkeep.inference.protocol import grpc_form
from shardkeep.inference.server.health import CHECK, add_health
from shardkeep.inference.server.service import Service
from shardkeep.ps.control.grpc.auth import open_port
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.web.access import Access

Handle = Callable[[bytes, Any], bytes]


class GrpcFront:
    """A gRPC server on an address."""

    def __init__(self, service: Service, address: str, access: Access, *, most_bytes: int, most_calls: int) -> None:
        """Listens. Raises ConfigError where it cannot.

        Args:
            most_calls: That run at a time; further ones are refused."""
        options = [
            ("grpc.so_reuseport", 0),  # else a second server on the port silently takes half of the calls
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", most_bytes),
            ("grpc.server_handshake_timeout_ms", 4000),
        ]
        interceptors: list[Any] = [] if access.token is None else [_TokenCheck(access)]
        threads = ThreadPoolExecutor(most_calls, thread_name_prefix="grpc")  # which makes them as calls need them
        self._server = grpc.server(threads, None, interceptors, options, most_calls)
        self._service, self._reader = service, grpc_form.RequestReader()
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._drain = add_health(self._server)
        self.port = open_port(self._server, address, access.tls)

    async def start(self) -> None:
        self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accepts no further call; running ones have `grace_s` seconds."""
        self._drain()
        stopped = self._server.stop(grace_s)
        await asyncio.get_running_loop().run_in_executor(None, stopped.wait)

    def _handlers(self) -> Any:
        calls: dict[str, Callable[[bytes], bytes]] = {
            "ModelInfer": self._infer,
            "ModelMetadata": self._model,
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: grpc_form.write_server(self._service.server()),
            "ServerLive": lambda _: grpc_form.write_state(True),
            "ServerReady": lambda _: grpc_form.write_state(self._service.ready),
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._guarded(call)) for name, call in calls.items()}
        return grpc.method_handlers_generic_handler(grpc_form.SERVICE, handlers)

    def _guarded(self, call: Callable[[bytes], bytes]) -> Handle:
        """The call, with an error of the protocol for every exception."""

        def handle(message: bytes, context: Any) -> bytes:
            try:
                return call(message)
            except Exception as error:
                refusal = self._service.failed("grpc", error)
            context.abort(getattr(grpc.StatusCode, refusal.status.grpc_code), str(refusal))
            raise AssertionError("abort raises")

        return handle

    def _infer(self, message: bytes) -> bytes:
        request = self._reader.read(message)
        return grpc_form.write_reply(self._service.infer_and_wait("grpc", request), raw=request.raw)

    def _model(self, message: bytes) -> bytes:
        return grpc_form.write_model(self._service.model(*grpc_form.read_model(message, metadata=True)))

    def _model_ready(self, message: bytes) -> bytes:
        return grpc_form.write_state(self._service.model_ready(*grpc_form.read_model(message, metadata=False)))


class _TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses calls without the token on their headers alone: their messages are not read."""

    def __init__(self, access: Access) -> None:
        self._access = access

        def refuse(_messages: Any, context: Any) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, Access.WHERE)

        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        """The call's own handler, or one that refuses. Probes have no token, over HTTP neither."""
        shown = [value for key, value in call.invocation_metadata or () if key == "authorization"]
        text = shown[0] if len(shown) == 1 else ""
        given = text.encode("utf-8", "replace") if isinstance(text, str) else text
        if call.method != CHECK and not self._access.admits(given):
            return self._refusal
        return continuation(call)
