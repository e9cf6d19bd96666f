"""Who may call: the proof that goes with every call, its check before any handler runs, and TLS for both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.addresses import check_listen, split_address
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.trust.proof import HEADER, Call, answer_headers, error_bytes
from shardkeep.trust.tls import Tls

_WHERE = "it is in the coordinator's --token-file, or in the file that it named when it began"

_log = EventLog("control")


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses, with UNAUTHENTICATED, each call that does not prove that its caller knows the job's token.

    It decides on the headers alone: of a refused call no message is read, and no thread waits for one. What is
    answered, an error too, carries the coordinator's own proof."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        """The call's own handler, or one that refuses."""
        shown = [value for key, value in call.invocation_metadata or () if key == HEADER]
        proof = Call.read(shown[0]) if len(shown) == 1 and isinstance(shown[0], str) else None
        if proof is None or not proof.proves(self._token, call.method):
            return grpc.stream_stream_rpc_method_handler(_refusal("wrong token" if shown else "no token"))
        handler = continuation(call)
        return handler and _proven(handler, self._token, proof)


def _proven(handler: Any, token: str, proof: Call) -> Any:
    """The handler of a call whose headers are good: checks the message, and signs what is answered."""

    def answer(message: bytes, context: Any) -> bytes:
        if not proof.carries(message):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the message was changed on its way")
        try:
            reply: bytes = handler.response_serializer(
                handler.unary_unary(handler.request_deserializer(message), context)
            )
        except Exception:
            if context.code() is not None:  # refused by `abort`, which raises; else gRPC finds words
                refused = error_bytes(context.code().name, _text(context.details()))
                context.set_trailing_metadata(answer_headers(token, proof, refused))
            raise
        context.set_trailing_metadata(answer_headers(token, proof, reply))
        return reply

    return grpc.unary_unary_rpc_method_handler(answer)


def _refusal(why: str) -> Callable[[Iterator[bytes], Any], Iterable[bytes]]:
    def refuse(_messages: Iterator[bytes], context: Any) -> Iterable[bytes]:
        _log.warning("call refused", once=why, why=why, peer=context.peer())
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{why}; {_WHERE}")
        return ()

    return refuse


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def open_channel(target: str, tls: Tls | None, options: list[tuple[str, Any]]) -> grpc.Channel:
    """A channel to `target`, in gRPC's words; connects when it is first used."""
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(target, credentials, options=options)


def open_port(server: grpc.Server, address: str, tls: Tls | None) -> int:
    """Listens, with `tls` only for peers whose certificate the same authority signed; the port. Raises ConfigError."""
    check_listen(*split_address(address, lowest_port=0))
    with contextlib.suppress(RuntimeError):
        if tls is None:
            return int(server.add_insecure_port(address))
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.ca, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))
    raise ConfigError(f"cannot listen on {address}: the port is in use or the host is not this machine's")
