"""Counts the bytes of a worker's messages to and from servers as they pass, each byte once, and what torch RPC adds.

What the bytes are is in each message's header and directory, so the client knows nothing of it. Holds no row.

torch RPC (2.13) adds, over TensorPipe's `uv` and `basic`, as `transport.same_host: sockets` and other hosts have it:
lengths, a descriptor, the number of the call, and the pickled shapes of its tensors; for each tensor its length. All
have fixed sizes, except numbers, which are written as short as they can be. ps/rpc/envelope.py adds a byte, or three to
two messages. Nobody publishes these sizes: tests/ps/rpc/test_envelope.py compares them with the kernel's counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.ledger import Ledger
from shardkeep.ps.transport.transport import MAX_INLINE, Transport
from shardkeep.ps.wire.ids import ROW_BITS
from shardkeep.ps.wire.message import FLUSH, Kind, Packed, read
from shardkeep.ps.wire.rows import RowReader

Parts = Mapping[str, int]
"""Bytes by part of the ledger."""

_DIRECTIONS = {Kind.PULL: "pull", Kind.FENCE: "pull", Kind.READ: "read", Kind.PUSH: "push", Kind.ASK: "control"}
_STEPPED = ("push", "pull", "tower")
"""Directions whose bytes belong to a step of training."""
_RPC = 127
"""What torch adds to any call or answer."""
_TENSORS, _TENSOR = 98, 72
"""What tensors add, whatever their number, and each of up to 127 bytes."""


class Meter(Protocol):
    """Where a MeteredTransport books what passes."""

    def book(self, server: int, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        """Books one message to a server, or its answer to a call. Any thread."""
        ...


class MeteredTransport:
    """A transport that books each message, with what torch RPC adds to it.

    A message is booked before `send` returns, an answer before its future is done: totals are exact after `result`."""

    def __init__(self, transport: Transport, meter: Meter, rows: RowReader | None = None) -> None:
        """`rows`: reads which bytes of rows are no values; None = all count as values."""
        self.num_servers = transport.num_servers
        self._transport = transport
        self._meter = meter
        self._rows = rows

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        answer = self._transport.send(server, message, then, timeout_s=timeout_s)
        last = read(message)  # after the call: the server works meanwhile
        self._book(server, last, call_bytes(message.size))
        if then is not None:
            last = read(then)
            self._book(server, last, call_bytes(message.size, then.size) - call_bytes(message.size))
        return self._booked(server, last, answer)

    def close(self) -> None:
        self._transport.close()

    def _book(self, server: int, message: Packed, rpc_bytes: int) -> None:
        parts = self._parts(message)
        if message.kind is Kind.PUSH and message.value & FLUSH:
            parts = {"flush": message.buffer.size}
        self._add(server, message, parts | {"rpc": rpc_bytes}, answer=False)

    def _booked(self, server: int, asked: Packed, answer: Future[Bytes]) -> Future[Bytes]:
        """An answer whose future is done when it is booked."""
        if answer.done():
            self._book_answer(server, asked, answer)
            return answer
        booked: Future[Bytes] = Future()

        def finish(answer: Future[Bytes]) -> None:
            try:
                self._book_answer(server, asked, answer)
            finally:
                error = answer.exception()
                if error is None:
                    booked.set_result(answer.result())
                else:
                    booked.set_exception(error)

        answer.add_done_callback(finish)
        return booked

    def _book_answer(self, server: int, asked: Packed, answer: Future[Bytes]) -> None:
        if answer.exception() is not None:
            return
        try:
            message = read(answer.result())
            parts = self._parts(message)
        except CorruptMessage:  # the caller raises it
            return
        self._add(server, asked, parts | {"rpc": answer_bytes(message.buffer.size)}, answer=True)

    def _add(self, server: int, asked: Packed, parts: Parts, *, answer: bool) -> None:
        if asked.kind is Kind.ASK:
            parts = {"questions": sum(parts.values())}
        self._meter.book(server, _DIRECTIONS[asked.kind], asked.step, parts, answer=answer)

    def _parts(self, message: Packed) -> dict[str, int]:
        """What the bytes of a message are."""
        id_bytes, value_bytes = message.ids_area.size, message.values_area.size
        parts = {"ids": id_bytes, "values": value_bytes, "framing": message.buffer.size - id_bytes - value_bytes}
        if id_bytes and int(message.id_formats_S[0]) == ROW_BITS:
            parts |= {"masks": id_bytes, "ids": 0}
        if self._rows is not None and value_bytes:
            beside = self._rows.parts(message)
            parts |= beside | {"values": value_bytes - sum(beside.values())}
        return parts


class WorkerTraffic:
    """What one worker sends in its life, over all generations."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.sent_until = dict.fromkeys(_STEPPED, 0)
        """By direction, the step after the last one that bytes were sent for."""


class LedgerMeter:
    """Books one generation's bytes in the ledger. Those of a step that an earlier generation sent are retries.

    The step under way is the one after the last push; before the first push, the step of the first pull."""

    def __init__(self, traffic: WorkerTraffic) -> None:
        self._ledger = traffic.ledger
        self._sent_until = traffic.sent_until
        self._retries_until = dict(traffic.sent_until)
        self._step: int | None = None

    def book(self, server: int, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        """Books a message between this worker and a server."""
        if not answer and direction == "push":
            self._step = step + 1
        elif not answer and direction == "pull" and self._step is None:
            self._step = step
        self._add(direction, step, parts, answer=answer)

    def book_among_workers(self, direction: str, parts: Parts) -> None:
        """Books what this worker sends the others in the step under way."""
        self._add(direction, self._step or 0, parts, answer=False)

    def _add(self, direction: str, step: int, parts: Parts, *, answer: bool) -> None:
        if direction in self._sent_until:
            if not answer:  # one thread sends; answers come in others
                self._sent_until[direction] = max(self._sent_until[direction], step + 1)
            if step < self._retries_until[direction]:
                parts = {"retries": sum(parts.values())}
        self._ledger.add_parts(direction, parts, answer=answer)


def call_bytes(*sizes: int) -> int:
    """Of a call that carries one or two messages of these sizes."""
    return _rpc_bytes(sizes, 2 * len(sizes))  # torch's flag, the kind; with two messages the size of the first


def answer_bytes(size: int) -> int:
    """Of an answer of this size."""
    return _rpc_bytes((size,), 1)


def _rpc_bytes(sizes: Sequence[int], own_bytes: int) -> int:
    """Of a call or an answer that has so many bytes beside its messages."""
    if (total := sum(sizes)) <= MAX_INLINE:
        return _RPC + own_bytes + _size_bytes(total + own_bytes)
    shapes = sum(0 if size < 1 << 8 else 2 if size < 1 << 16 else 6 for size in sizes)  # each has its size twice
    return _RPC + min(own_bytes, 2) + _TENSORS + shapes + sum(_TENSOR + _size_bytes(size) for size in sizes)


def _size_bytes(size: int) -> int:
    """What a size takes in the descriptor (libnop: 1, 2, 3 or 5 bytes) beyond the shortest form."""
    return 0 if size < 1 << 7 else 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
