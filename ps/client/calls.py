"""ServerCalls: one worker's messages to the servers of its generation, each with a deadline; checks what a reply is.

Knows no ids and no rows.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import wait_for_reply
from shardkeep.base.errors import CorruptMessage, ProtocolError, RemoteError
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.admin import Call, R, decode_reply, encode_call
from shardkeep.ps.wire.message import Kind, Packed, allocate, read, text_message, text_of

Replies = Callable[[Sequence[tuple[int, Future[Bytes]]], Kind], Iterator[tuple[int, Packed]]]
"""Waits for replies, as `ServerCalls.replies` does."""


class ServerCalls:
    """Calls of one worker. Thread safe, except `regroup` and `extend_deadlines`."""

    def __init__(
        self, transport: Transport, *, rank: int, generation: int, timeout_s: float, patience_s: float = 0.0
    ) -> None:
        """`patience_s`: seconds more for a reply, where the transport itself ends a call."""
        self.rank = rank
        self._transport = transport
        self.generation = generation
        self._timeout_s = timeout_s
        self._extra_s = 0.0
        self._patience_s = patience_s

    def regroup(self, transport: Transport, generation: int) -> None:
        """Continues over another generation's transport."""
        self._transport, self.generation = transport, generation

    def extend_deadlines(self, extra_s: float) -> None:
        """Extends the limit of later calls by so many seconds; 0 = no extension."""
        self._extra_s = extra_s

    @property
    def num_servers(self) -> int:
        return self._transport.num_servers

    @property
    def limit_s(self) -> float:
        """Seconds that a call may take."""
        return self._timeout_s + self._extra_s

    def allocate(self, kind: Kind, step: int, **directory: Any) -> Packed:
        """Allocates a message of this worker and generation; `directory`: see `message.allocate`."""
        return allocate(kind, generation=self.generation, rank=self.rank, step=step, **directory)

    def send(self, server: int, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        """As `Transport.send`."""
        return self._transport.send(server, message, then, timeout_s=self.limit_s)

    def reply(self, server: int, future: Future[Bytes], expected: Kind, limit_s: float | None = None) -> Packed:
        """Returns the reply of a server; blocks until it arrives.

        Raises DeadlineExceeded, TransportError, RemoteError for an ERROR, CorruptMessage, and ProtocolError for a
        reply of another kind."""
        timeout_s = (self.limit_s if limit_s is None else limit_s) + 1.0 + self._patience_s
        packed = wait_for_reply(future, peer=f"server {server}", timeout_s=timeout_s)
        try:
            reply = read(packed)
        except CorruptMessage as error:
            raise CorruptMessage(f"server {server} answered {error}") from error
        if reply.kind is Kind.ERROR:
            raise RemoteError(f"server {server}: {text_of(reply)}")
        if reply.kind is not expected:
            raise ProtocolError(f"server {server} answered {reply.kind.name}, expected {expected.name}")
        return reply

    def replies(self, futures: Sequence[tuple[int, Future[Bytes]]], expected: Kind) -> Iterator[tuple[int, Packed]]:
        """Yields each server with its reply, in their order; blocks until the next has arrived. Raises as `reply`."""
        for server, future in futures:
            yield server, self.reply(server, future, expected)

    def ask(self, call: Call, kind: type[R], timeout_s: float | None = None) -> list[R]:
        """Sends an admin call to every server and returns their replies, of this kind, in the order of the servers.
        Blocks. `timeout_s`: of this call; None = as of others. A server ends its own long work that is stuck.

        Raises DeadlineExceeded, TransportError, ProtocolError, or RemoteError when a server refuses or fails."""
        limit_s = self.limit_s if timeout_s is None else timeout_s
        packed = text_message(Kind.ASK, encode_call(call), generation=self.generation, rank=self.rank)
        futures = [self._transport.send(s, packed, timeout_s=limit_s) for s in range(self.num_servers)]
        concurrent.futures.wait(futures, timeout=limit_s + 1.0)  # all, also where one has failed: none works on unseen
        replies = [self.reply(s, f, Kind.ANSWER, limit_s) for s, f in enumerate(futures)]
        return [decode_reply(text_of(reply), kind) for reply in replies]


class ReplyWaits:
    """Waits for the replies to a step's messages, in place of `ServerCalls.replies`, and measures how long. Not thread
    safe.

    Where replies of several servers are missing, the last one to arrive gets the whole wait: without that server the
    worker would not have waited so long."""

    def __init__(self, calls: ServerCalls, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[int, float] = {}
        """Seconds of waiting so far, by server."""
        self._calls, self._clock = calls, clock

    def replies(self, futures: Sequence[tuple[int, Future[Bytes]]], expected: Kind) -> Iterator[tuple[int, Packed]]:
        """As `ServerCalls.replies`."""
        waited_s, last = 0.0, -1
        for server, future in futures:
            if future.done():
                yield server, self._calls.reply(server, future, expected)
                continue
            began = self._clock()
            reply = self._calls.reply(server, future, expected)
            waited_s, last = waited_s + self._clock() - began, server  # those before it had come
            yield server, reply
        if last >= 0:
            self.seconds[last] = self.seconds.get(last, 0.0) + waited_s
