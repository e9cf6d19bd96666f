"""A member's connection to the coordinator: deadlines, one mapping of errors, counted bytes. Knows no job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from shardkeep.base.errors import DeadlineExceeded, ShardkeepError, TransportError, UserError
from shardkeep.ps.control.grpc.addresses import join_address, split_address
from shardkeep.ps.control.grpc.auth import open_channel
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.grpc.proof import Call, error_bytes, proves_answer
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.ps.control.grpc.statuses import HANGS_UP, OURS, error_of

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # members talk to each other, never through a web proxy
    ("grpc.use_local_subchannel_pool", 1),  # two clients in one process share no back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the time that one connecting may take, TLS included
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
]
RETRY_S = 0.1
_SERVICE = "/shardkeep.control.Control/"

Reply = TypeVar("Reply", bound=Message)


class ControlChannel:
    """Calls of the service Control. Thread safe.

    Args:
        endpoint: The coordinator. Raises ConfigError when its address is not HOST:PORT.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        host, port = split_address(endpoint.address)
        self.address = join_address(host, port)
        self.host = host
        self.bytes_total = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._token = endpoint.token
        self._channel = open_channel(endpoint, self.address, _OPTIONS)

    def call(self, method: str, request: Message, reply_type: type[Reply], *, timeout_s: float) -> Reply:
        """One attempt. Raises what the coordinator raised, TransportError, or UserError where who answers has not the
        job's token; never grpc.RpcError."""
        path, message = _SERVICE + method, request.SerializeToString()
        proof = Call.make(self._token, path, message)
        try:
            reply, call = self._channel.unary_unary(path, None, None).with_call(
                message, timeout=timeout_s, metadata=proof.headers()
            )
        except grpc.RpcError as error:
            raise self._error(error, proof) from None
        except ValueError as error:  # a closed channel
            raise TransportError(f"the connection to the coordinator at {self.address} is closed") from error
        if not proves_answer(self._token, proof, reply, call.trailing_metadata() or ()):
            raise self._stranger()
        with self._lock:
            self.bytes_total += len(message) + len(reply)
        return reply_type.FromString(reply)

    def insist(
        self,
        method: str,
        request: Message,
        reply_type: type[Reply],
        *,
        timeout_s: float,
        waiting: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Repeats an idempotent call until it is answered; DeadlineExceeded once `timeout_s` passed. `waiting` is
        called once, if the first attempt is not answered."""
        start, first = time.monotonic(), True
        while True:
            left_s = timeout_s - (time.monotonic() - start)
            try:
                return self.call(method, request, reply_type, timeout_s=max(left_s, RETRY_S))
            except ShardkeepError as error:
                if not error.retryable:
                    raise
                if first:
                    first = False
                    waiting()
                gone = left_s <= RETRY_S or self._closed.wait(RETRY_S)
                if gone:
                    raise _unanswered(self.address, time.monotonic() - start, error) from error

    def close(self) -> None:
        """Calls under way end with TransportError."""
        self._closed.set()
        self._channel.close()

    def _error(self, error: Any, proof: Call) -> ShardkeepError:
        if error.code() in OURS:
            refused = error_bytes(error.code().name, error.details() or "")
            if not proves_answer(self._token, proof, refused, error.trailing_metadata() or ()):
                return self._stranger()
        return error_of(error, self.address)

    def _stranger(self) -> UserError:
        return UserError(
            f"{self.address} answers, but does not prove that it knows the job's token: it is not the job's coordinator"
        )


def _unanswered(address: str, elapsed_s: float, last: ShardkeepError) -> TransportError:
    tls = ", and whether it wants --tls" if HANGS_UP in str(last) else ""
    return DeadlineExceeded(
        f"no coordinator answered at {address} within {elapsed_s:.1f} s; check the address and that it runs{tls}"
    )
