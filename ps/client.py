"""Pull and push as a worker sees them: ids and rows in, rows out; one message per server and step.

Does not deduplicate, pool or know batches (workers/embeddings.py), and knows no sockets (transport.py).
"""
# U = unique ids of a table in a step, K = rows sent, D = embedding dim

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage, ProtocolError, RemoteError
from shardkeep.compression.codec import value_codec
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.ledger import Ledger
from shardkeep.compression.quantize import saturated_values
from shardkeep.compression.topk import select_rows
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.message import (
    EMPTY,
    Bytes,
    Kind,
    Message,
    Section,
    overhead,
    pack,
    text_message,
    text_of,
    unpack,
)
from shardkeep.ps.placement import Split, split
from shardkeep.ps.transport import Transport, wait

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
_DIRECTION = {Kind.PULL: "pull", Kind.READ: "read"}  # in the ledger: evaluation is not training's traffic


@dataclass(frozen=True, slots=True)
class Request:
    """A step's unique ids per table, placed and split; made ahead of the pull, needed again by the push."""

    ids: Mapping[str, Ids]
    splits: Mapping[str, Split]


@dataclass(slots=True)
class Pull:
    """Rows on their way. `result` blocks until they are here."""

    request: Request
    kind: Kind
    _client: RowClient
    _tables: list[list[str]]
    _futures: list[tuple[int, Future[Bytes]]]
    staleness: int = 0
    """Steps that the rows lag behind, the largest of all servers; valid after `result`."""

    def result(self) -> dict[str, Rows]:
        """Rows (U, D) per table, in the order of the request's ids.

        Raises DeadlineExceeded, TransportError or RemoteError."""
        return self._client._receive(self)


@dataclass(slots=True)
class _Unacknowledged:
    """A step's packed pushes by server, kept until each is acknowledged: a resend is the same bytes."""

    messages: dict[int, Bytes]
    futures: dict[int, Future[Bytes]] = field(default_factory=dict)


class RowClient:
    """One worker's access to all embedding servers.

    Not thread safe, but for `request`. Steps count from the job's start; each rank pushes once per step, to every
    server (an empty message where it has no rows), and pulls a step before it pushes it.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        tables: Sequence[TableSpec],
        rank: int = 0,
        generation: int = 0,
        consistency: ConsistencyConfig | None = None,
        compression: CompressionConfig | None = None,
        ledger: Ledger | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.tables = {spec.name: spec for spec in tables}
        self.rank = rank
        self.ledger = ledger if ledger is not None else Ledger()
        self.timeout_s = timeout_s
        self.staleness_seen: dict[int, int] = {}
        self.saturated_values = 0
        """Gradient values sent as the largest number of a 16-bit push format, because they were beyond its range."""
        self._index = {spec.name: i for i, spec in enumerate(tables)}
        self._transport = transport
        self._generation = generation
        self._consistency = consistency if consistency is not None else ConsistencyConfig()
        compression = compression if compression is not None else CompressionConfig()
        self._keep_rows = compression.push.keep_rows
        self._push_codec = value_codec(compression.push.values)
        self._unacknowledged: dict[int, _Unacknowledged] = {}

    @property
    def num_servers(self) -> int:
        return self._transport.num_servers

    @property
    def push_format(self) -> str:
        """The number format of pushed gradients, as the config names it."""
        return self._push_codec.name

    # ---- pull ----

    def request(self, ids: Mapping[str, Ids]) -> Request:
        """Places each table's ids (int64, sorted, unique) on servers. Pure; may run in another thread.

        Raises ProtocolError for ids of another type or of a table that is not there."""
        for name, ids_U in ids.items():
            if name not in self._index:
                raise ProtocolError(f"table {name} is unknown; the tables are {', '.join(self._index)}")
            if ids_U.dtype != np.int64 or ids_U.ndim != 1:
                raise ProtocolError(f"table {name}: ids of {ids_U.dtype} {ids_U.shape}; allowed: int64 (U,)")
        return Request(ids, {name: split(ids_U, self.num_servers) for name, ids_U in ids.items()})

    def pull(self, step: int, request: Request) -> Pull:
        """Asks for the rows that step `step` uses; returns at once, except in `sync`, which first waits until
        every server has acknowledged this rank's earlier pushes."""
        if self._consistency.mode == "sync":
            self.wait_acknowledged()
        return self._ask_rows(Kind.PULL, step, request)

    def read(self, request: Request) -> Pull:
        """Asks for rows as they are now, without any promise of order (evaluation)."""
        return self._ask_rows(Kind.READ, 0, request)

    def fence(self, step: int) -> None:
        """Blocks until the servers have applied all that this rank pushed before `step`; in `sync`, all that every
        rank pushed (every rank must call it)."""
        self.wait_acknowledged()
        if self._consistency.mode == "sync":
            self._ask_rows(Kind.PULL, step, Request({}, {})).result()

    def _ask_rows(self, kind: Kind, step: int, request: Request) -> Pull:
        tables: list[list[str]] = []
        futures: list[tuple[int, Future[Bytes]]] = []
        for server in range(self.num_servers):
            names = [name for name, s in request.splits.items() if s.count(server)]
            tables.append(names)
            if not names and not (kind is Kind.PULL and self._consistency.mode == "sync"):
                continue
            sections = tuple(
                Section(
                    table=self._index[name],
                    rows=request.splits[name].count(server),
                    ids=_bytes(request.splits[name].of_server(request.ids[name], server)),
                    values=EMPTY,
                )
                for name in names
            )
            message = Message(kind, self._generation, self.rank, step, sections)
            self._count(_DIRECTION[kind], message)
            futures.append((server, self._transport.send(server, pack(message), timeout_s=self.timeout_s)))
        return Pull(request, kind, self, tables, futures)

    def _receive(self, pull: Pull) -> dict[str, Rows]:
        request = pull.request
        rows: dict[str, Rows] = {}
        for name, ids_U in request.ids.items():
            rows[name] = np.empty((ids_U.size, self.tables[name].dim), dtype=np.float32)
        seen = 0
        for server, future in pull._futures:
            answer = self._answer(server, future, Kind.ROWS)
            names = pull._tables[server]
            if len(answer.sections) != len(names):
                raise CorruptMessage(f"server {server} answered {len(answer.sections)} tables, asked for {len(names)}")
            for name, section in zip(names, answer.sections, strict=True):
                where = request.splits[name]
                decoded = value_codec(section.value_format).decode(section.values, self.tables[name].dim)
                if section.table != self._index[name] or decoded.shape[0] != where.count(server):
                    raise CorruptMessage(
                        f"server {server} answered {decoded.shape[0]} rows of table number {section.table}, "
                        f"asked for {where.count(server)} of {self._index[name]} ({name})"
                    )
                where.put_rows(server, decoded, rows[name])
            seen = max(seen, answer.value)
            self._count(_DIRECTION[pull.kind], answer)
        pull.staleness = seen
        if pull.kind is Kind.PULL and request.ids:
            self.staleness_seen[seen] = self.staleness_seen.get(seen, 0) + 1
        return rows

    # ---- push ----

    def push(self, step: int, request: Request, grads: Mapping[str, Rows]) -> None:
        """Sends the gradients (U, D) of the request's rows; returns without waiting for the acknowledgement,
        unless as many steps as the consistency mode allows are already unacknowledged.

        The gradients are encoded before this returns and may be reused by the caller. Tables may be left out.

        Raises ProtocolError when gradients do not fit the request or the step was pushed before; and what
        `Pull.result` raises, for an earlier push that failed."""
        self._check_push(step, request, grads)
        self._wait_for_window(step)
        parts: list[list[Section]] = [[] for _ in range(self.num_servers)]
        for name, grad_UD in grads.items():
            self._encode(name, request, grad_UD, parts)
        messages: dict[int, Bytes] = {}
        for server in range(self.num_servers):
            message = Message(Kind.PUSH, self._generation, self.rank, step, tuple(parts[server]))
            self._count("push", message)
            messages[server] = pack(message)
        pending = self._unacknowledged[step] = _Unacknowledged(messages)
        for server, packed in messages.items():
            pending.futures[server] = self._transport.send(server, packed, timeout_s=self.timeout_s)

    def _check_push(self, step: int, request: Request, grads: Mapping[str, Rows]) -> None:
        if step in self._unacknowledged:
            raise ProtocolError(f"step {step} was pushed before and is not acknowledged yet; a step is pushed once")
        for name, grad_UD in grads.items():
            if name not in request.ids:
                raise ProtocolError(f"gradients of table {name}, which the request has no ids of")
            expected = (request.ids[name].size, self.tables[name].dim)
            if grad_UD.shape != expected or grad_UD.dtype != np.float32 or not grad_UD.flags.c_contiguous:
                raise ProtocolError(
                    f"table {name}: {grad_UD.dtype} gradients {grad_UD.shape}; expected contiguous float32 {expected}"
                )

    def _encode(self, name: str, request: Request, grad_UD: Rows, parts: list[list[Section]]) -> None:
        ids_U, where = request.ids[name], request.splits[name]
        if self._keep_rows < 1.0:
            kept = select_rows(grad_UD, self._keep_rows)
            ids_U, grad_UD = ids_U[kept], grad_UD[kept]
            where = split(ids_U, self.num_servers)
        encoded_KR = self._push_codec.encode(grad_UD)
        self.saturated_values += saturated_values(self._push_codec, encoded_KR)
        for server in range(self.num_servers):
            if count := where.count(server):
                parts[server].append(
                    Section(
                        table=self._index[name],
                        rows=count,
                        ids=_bytes(where.of_server(ids_U, server)),
                        values=_bytes(where.of_server(encoded_KR, server)),
                        value_format=self._push_codec.tag,
                    )
                )

    def wait_acknowledged(self) -> None:
        """Blocks until every push is acknowledged. Raises what `Pull.result` raises."""
        for step in sorted(self._unacknowledged):
            self._settle(step)

    def _wait_for_window(self, step: int) -> None:
        for earlier in sorted(self._unacknowledged):
            pending = self._unacknowledged[earlier]
            if earlier <= step - self._consistency.window or all(f.done() for f in pending.futures.values()):
                self._settle(earlier)

    def _settle(self, step: int) -> None:
        for server, future in self._unacknowledged[step].futures.items():
            self._count("push", self._answer(server, future, Kind.ACK))
        del self._unacknowledged[step]

    # ---- questions ----

    def ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Asks every server a question in JSON; their answers in order of the servers."""
        text = json.dumps(dict(question))
        packed = text_message(Kind.ASK, text, generation=self._generation, rank=self.rank)
        futures = [self._transport.send(s, packed, timeout_s=self.timeout_s) for s in range(self.num_servers)]
        return [json.loads(text_of(self._answer(s, f, Kind.ANSWER))) for s, f in enumerate(futures)]

    def _answer(self, server: int, future: Future[Bytes], expected: Kind) -> Message:
        packed = wait(future, peer=f"server {server}", timeout_s=self.timeout_s + 1.0)
        try:
            answer = unpack(packed)
        except CorruptMessage as error:
            raise CorruptMessage(f"server {server} answered {error}") from error
        if answer.kind is Kind.ERROR:
            raise RemoteError(f"server {server}: {text_of(answer)}")
        if answer.kind is not expected:
            raise ProtocolError(f"server {server} answered {answer.kind.name}, expected {expected.name}")
        return answer

    def _count(self, direction: str, message: Message) -> None:
        self.ledger.add(direction, "ids", sum(s.ids.size for s in message.sections))
        self.ledger.add(direction, "values", sum(s.values.size for s in message.sections))
        self.ledger.add(direction, "framing", overhead(message))


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
