"""Who may call: the token that goes with every call, its check before any handler runs, and TLS for both sides."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardkeep.base.log import EventLog
from shardkeep.ps.control.endpoint import Endpoint
from shardkeep.ps.control.quiet_grpc import grpc
from shardkeep.ps.control.tls import Tls

HEADER = "authorization"
_SCHEME = "Bearer "
_WHERE = "it is in the coordinator's --token-file, or in the file that it named when it began"

_log = EventLog("control")


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a call carries."""
    return ((HEADER, _SCHEME + token),)


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses, with UNAUTHENTICATED, each call without the job's token.

    It decides on the headers alone: of a refused call no message is read, and no thread waits for one."""

    def __init__(self, token: str) -> None:
        self._expected = (_SCHEME + token).encode()

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        """The call's own handler, or one that refuses."""
        shown = [value for key, value in call.invocation_metadata or () if key == HEADER]
        if len(shown) == 1 and hmac.compare_digest(_bytes(shown[0]), self._expected):
            return continuation(call)
        return grpc.stream_stream_rpc_method_handler(_refusal("wrong token" if shown else "no token"))


def _refusal(why: str) -> Callable[[Iterator[bytes], Any], Iterable[bytes]]:
    def refuse(_messages: Iterator[bytes], context: Any) -> Iterable[bytes]:
        _log.warning("call refused", once=why, why=why, peer=context.peer())
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{why}; {_WHERE}")
        return ()

    return refuse


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode(errors="replace")


def open_channel(endpoint: Endpoint, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
    """A channel to the endpoint's `address`, written in one form; connects when it is first used."""
    tls = endpoint.tls
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(address, credentials, options=options)


def open_port(server: grpc.Server, address: str, tls: Tls | None) -> int:
    """Listens, with `tls` only for peers whose certificate the same authority signed; the port. Raises RuntimeError."""
    if tls is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.ca, require_client_auth=True)
    return int(server.add_secure_port(address, credentials))
