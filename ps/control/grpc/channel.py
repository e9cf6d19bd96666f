"""A member's connection to the coordinator: deadlines, one mapping of errors, counted bytes. Knows no job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from shardkeep.base.errors import DeadlineExceeded, ProtocolError, ShardkeepError, TransportError, UserError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.addresses import join_address, resolve, split_address
from shardkeep.ps.control.grpc.auth import open_channel
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.ps.control.grpc.statuses import HANGS_UP, OURS, error_of
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.proof import Call, error_bytes, proves_answer

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
LOOK_S = 1.0  # between two looks where the coordinator is
_log = EventLog("control")
_SERVICE = "/shardkeep.control.Control/"

Reply = TypeVar("Reply", bound=Message)


class ControlChannel:
    """Calls of the service Control, to where the coordinator is: looked up whenever nobody answered. Thread safe.

    Args:
        endpoint: The coordinator. Raises ConfigError when its address is not HOST:PORT.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = join_address(*split_address(endpoint.address))
        self.bytes_total = 0
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._endpoint, self._token = endpoint, endpoint.token
        self._peers, self._unknown = tuple[str, ...](), ""  # why the name has no address
        self._channel: grpc.Channel | None = None
        self._answered, self._looked = False, -LOOK_S

    def peers(self) -> tuple[str, ...]:
        """The coordinator's addresses. Raises TransportError while its name has none."""
        self._open()
        return self._peers

    def call(self, method: str, request: Message, reply_type: type[Reply], *, timeout_s: float) -> Reply:
        """One attempt. Raises what the coordinator raised, TransportError, or UserError where who answers has not the
        job's token; never grpc.RpcError."""
        channel, path, message = self._open(), _SERVICE + method, request.SerializeToString()
        proof = Call.make(self._token, path, message)
        try:
            reply, call = channel.unary_unary(path, None, None).with_call(
                message, timeout=timeout_s, metadata=proof.headers()
            )
        except grpc.RpcError as error:
            failure = self._error(error, proof)
            self._answered = self._answered and not failure.retryable
            raise failure from None
        except ValueError as error:  # a closed channel
            raise TransportError(f"the connection to the coordinator at {self.address} is closed") from error
        if not proves_answer(self._token, proof, reply, call.trailing_metadata() or ()):
            raise self._stranger()
        with self._lock:
            self._answered = True
            self.bytes_total += len(message) + len(reply)
        try:
            return reply_type.FromString(reply)
        except DecodeError:
            text = f"the coordinator at {self.address} answers {method} in another form than this shardkeep reads"
            raise ProtocolError(f"{text}; install the same version everywhere") from None

    def insist(
        self,
        method: str,
        request: Message | Callable[[], Message],
        reply_type: type[Reply],
        *,
        timeout_s: float,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> Reply:
        """Repeats an idempotent call until it is answered; DeadlineExceeded once `timeout_s` passed. `request`: or what
        makes it for each attempt. `waiting` is called once, with why the first attempt was not answered."""
        start, first = time.monotonic(), True
        while True:
            left_s = timeout_s - (time.monotonic() - start)
            try:
                message = request if isinstance(request, Message) else request()
                return self.call(method, message, reply_type, timeout_s=max(left_s, RETRY_S))
            except ShardkeepError as error:
                if not error.retryable:
                    raise
                if first:
                    first = False
                    waiting(self._unknown or "no answer")
                gone = left_s <= RETRY_S or self._closed.wait(RETRY_S)
                if gone:
                    raise self._unanswered(time.monotonic() - start, error) from error

    def close(self) -> None:
        """Calls under way end with TransportError."""
        self._closed.set()
        with self._looking:
            if self._channel is not None:
                self._channel.close()

    def _open(self) -> grpc.Channel:
        """The channel to where the coordinator is, as far as known."""
        with self._looking:
            if not (self._answered or self._closed.is_set() or time.monotonic() < self._looked + LOOK_S):
                self._look()
            if self._channel is None:
                raise TransportError(f"the coordinator at {self.address} cannot be reached: {self._unknown}")
            return self._channel

    def _look(self) -> None:
        """Looks up where the coordinator is, and opens a channel to it if that is elsewhere."""
        self._answered, address = True, self._endpoint.now()
        host, port = split_address(address)
        try:
            peers, self._unknown = resolve(host), ""
        except OSError as error:  # what is known stays as it is
            self._answered, self._unknown = False, f"the name {host} has no address ({error.strerror or error})"
            peers = ()
        self._looked = time.monotonic()
        if peers and (set(peers) != set(self._peers) or address != self.address):
            if self._channel is not None:
                _log.info("the coordinator is elsewhere", address=address, at=", ".join(peers))
                self._channel.close()
            self.address, self._peers = address, peers
            options = [*_OPTIONS, ("grpc.default_authority", address)]
            self._channel = open_channel(_target(peers, port), self._endpoint.tls, options)

    def _error(self, error: Any, proof: Call) -> ShardkeepError:
        if error.code() in OURS:
            refused = error_bytes(error.code().name, error.details() or "")
            if not proves_answer(self._token, proof, refused, error.trailing_metadata() or ()):
                return self._stranger()
        return error_of(error, self.address)

    def _unanswered(self, elapsed_s: float, last: ShardkeepError) -> TransportError:
        tls = ", and whether it wants --tls" if HANGS_UP in str(last) else ""
        why = self._unknown or f"check the address and that it runs{tls}"
        tried = "".join(f" ({peer})" for peer in self._peers if peer not in split_address(self.address))
        return DeadlineExceeded(f"no coordinator answered at {self.address}{tried} within {elapsed_s:.1f} s; {why}")

    def _stranger(self) -> UserError:
        return UserError(
            f"{self.address} answers, but does not prove that it knows the job's token: it is not the job's coordinator"
        )


def _target(peers: Sequence[str], port: int) -> str:
    """Addresses in gRPC's words, which has one family for all: IPv6 if any is of it."""
    if not any(":" in peer for peer in peers):
        return "ipv4:" + ",".join(f"{peer}:{port}" for peer in peers)
    return "ipv6:" + ",".join(f"[{p.replace('%', '%25') if ':' in p else '::ffff:' + p}]:{port}" for p in peers)
