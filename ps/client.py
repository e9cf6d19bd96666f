"""Pull and push as a worker sees them: ids and rows in, rows out; one message per server and step.

Does not deduplicate, pool or know batches (workers/embeddings.py), and knows no sockets (transport.py).
"""
# U = unique ids of a table in a step, K = rows sent, D = embedding dim

from __future__ import annotations

import concurrent.futures
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
from shardkeep.ps import values
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.message import Bytes, Kind, Packed, allocate, read, text_message, text_of, unpack
from shardkeep.ps.placement import Split, split
from shardkeep.ps.slab import Catalog, IdSlab, RowSlab
from shardkeep.ps.transport import Transport, wait

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
_DIRECTION = {Kind.PULL: "pull", Kind.READ: "read"}  # in the ledger: evaluation is not training's traffic


@dataclass(frozen=True, slots=True)
class Request:
    """A step's unique ids per table, placed and split; made ahead of the pull, needed again by the push."""

    ids: IdSlab
    split: Split


@dataclass(slots=True)
class Pull:
    """Rows on their way. `result` blocks until they are here."""

    request: Request
    kind: Kind
    _client: RowClient
    _futures: list[tuple[int, Future[Bytes]]]
    received: bool = False
    """Whether `result` has returned them."""
    staleness: int = 0
    """Steps that the rows lag behind, the largest of all servers; valid after `result`."""

    def result(self) -> RowSlab:
        """Rows (U, D) per table, in the order of the request's ids.

        Raises DeadlineExceeded, TransportError or RemoteError."""
        return self._client._receive(self)


@dataclass(slots=True)
class _Unacknowledged:
    """A step's packed pushes by server, kept until each is acknowledged: a resend is the same bytes."""

    messages: dict[int, Bytes]
    pull: Pull
    """The pull that went with the pushes: its rows acknowledge them too."""
    futures: list[tuple[int, Future[Bytes]]] = field(default_factory=list)
    """Of the pushes that went alone."""

    def done(self) -> bool:
        return all(future.done() for _, future in [*self.futures, *self.pull._futures])


class RowClient:
    """One worker's access to all embedding servers.

    Not thread safe, but for `request` and `ask`. Steps count from the job's start; each rank pushes once per step, to
    every server (an empty message where it has no rows), and pulls a step before it pushes it.
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
        self._catalog = Catalog(tables)
        self._transport = transport
        self._generation = generation
        self._consistency = consistency if consistency is not None else ConsistencyConfig()
        compression = compression if compression is not None else CompressionConfig()
        self._keep_rows = compression.push.keep_rows
        self._push_codec = value_codec(compression.push.values)
        self._widths_T = values.widths(self._push_codec, self._catalog)
        self._unacknowledged: dict[int, _Unacknowledged] = {}
        self.next_push = 0
        """The step after the last one whose push was handed over to be sent."""
        self._no_request = self.request({})

    def regroup(self, transport: Transport, generation: int, step: int) -> None:
        """Goes on over another generation's transport, to as many servers, at `step`. What was not acknowledged is
        forgotten: whoever calls this pushes all steps from `step` on anew, and servers tell what they have already."""
        self._transport, self._generation = transport, generation
        self._unacknowledged.clear()
        self.next_push = step

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
        if not (isinstance(ids, IdSlab) and ids.layout.catalog.same(self._catalog)):
            ids = IdSlab.of_arrays(self._catalog, ids)
        return Request(ids, split(ids, self.num_servers))

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
            self._ask_rows(Kind.PULL, step, self.request({})).result()

    def _ask_rows(self, kind: Kind, step: int, request: Request) -> Pull:
        messages = self._pull_messages(kind, step, request)
        send = self._transport.send
        futures = [(server, send(server, message, timeout_s=self.timeout_s)) for server, message in messages.items()]
        return Pull(request, kind, self, futures)

    def _pull_messages(self, kind: Kind, step: int, request: Request) -> dict[int, Bytes]:
        """One message to each server that holds an id of the request; in `sync` a pull goes to every server."""
        messages: dict[int, Bytes] = {}
        for server in range(self.num_servers):
            if not request.split.count(server) and not (kind is Kind.PULL and self._consistency.mode == "sync"):
                continue
            tables_S, rows_S = _sections(request, server)
            message = self._allocate(kind, step, tables_S=tables_S, rows_S=rows_S, id_bytes_S=8 * rows_S)
            message.ids_area.view(np.int64)[:] = request.split.ids_of(server, request.ids.ids_V)
            self._count(_DIRECTION[kind], message)
            messages[server] = message.buffer
        return messages

    def _allocate(self, kind: Kind, step: int, **directory: Any) -> Packed:
        return allocate(kind, generation=self._generation, rank=self.rank, step=step, **directory)

    def _receive(self, pull: Pull) -> RowSlab:
        request, layout = pull.request, pull.request.ids.layout
        flat: Rows | None = None
        seen = 0
        for server, future in pull._futures:
            answer = self._answer(server, future, Kind.ROWS)
            part = self._decode(server, answer, request)
            if part.size == layout.num_values and part.flags.writeable:
                flat = part  # all of it: no copy
            else:
                flat = np.empty(layout.num_values, dtype=np.float32) if flat is None else flat
                request.split.put_rows(server, layout, part, flat)
            seen = max(seen, answer.value)
            self._count(_DIRECTION[pull.kind], answer)
        pull.staleness, pull.received = seen, True
        if pull.kind is Kind.PULL and request.ids:
            self.staleness_seen[seen] = self.staleness_seen.get(seen, 0) + 1
        return RowSlab(layout, np.empty(0, dtype=np.float32) if flat is None else flat, request.ids.names)

    def _decode(self, server: int, answer: Packed, request: Request) -> Rows:
        """The rows of one answer, flat; checked to be those that were asked for."""
        tables_S, rows_S = _sections(request, server)
        if not (np.array_equal(answer.tables_S, tables_S) and np.array_equal(answer.rows_S, rows_S)):
            raise CorruptMessage(
                f"server {server} answered {_told(answer.tables_S, answer.rows_S)}, asked for {_told(tables_S, rows_S)}"
            )
        return values.decode(answer, self._catalog)

    # ---- push ----

    def gradients(self, step: int, request: Request) -> RowSlab:
        """Zeros to add a step's gradients to, for the push of just this step and request. Where the push needs no other
        form, they already lie in its message: nobody may change them after the push."""
        if self.num_servers > 1 or self._keep_rows < 1.0 or self._push_codec.name != "fp32":
            return RowSlab.zeros(request.ids)
        message = self._push_message(step, request, 0)
        flat = message.values_area.view(np.float32)
        flat[:] = 0.0
        return RowSlab(request.ids.layout, flat, request.ids.names, message)

    def exchange(
        self, step: int, request: Request, grads: Mapping[str, Rows], next_step: int, next_request: Request
    ) -> Pull:
        """`push`, then `pull` of another step; in one message per server where the mode allows it, for a call costs
        more than its bytes."""
        if self._consistency.mode == "sync" and self.num_servers > 1:  # each must hold the push before any is pulled
            self.push(step, request, grads)
            return self.pull(next_step, next_request)
        messages = self._messages(step, request, grads)
        if self._consistency.mode == "sync":
            self.wait_acknowledged()
        return self._send(step, messages, self._pull_messages(Kind.PULL, next_step, next_request), next_request)

    def push(self, step: int, request: Request, grads: Mapping[str, Rows]) -> None:
        """Sends the gradients (U, D) of the request's rows; returns without waiting for the acknowledgement,
        unless as many steps as the consistency mode allows are already unacknowledged.

        The gradients are encoded before this returns and may be reused by the caller. Tables may be left out.

        Raises ProtocolError when gradients do not fit the request or the step was pushed before; and what
        `Pull.result` raises, for an earlier push that failed."""
        self._send(step, self._messages(step, request, grads), {}, None)

    def _messages(self, step: int, request: Request, grads: Mapping[str, Rows]) -> dict[int, Bytes]:
        """A step's pushes by server, as soon as the window of unacknowledged steps has room for them."""
        if step in self._unacknowledged:
            raise ProtocolError(f"step {step} was pushed before and is not acknowledged yet; a step is pushed once")
        request, slab = self._fitted(request, grads)
        self._wait_for_window(step)
        if self._keep_rows < 1.0:
            request, slab = self._selected(request, slab)
        return self._encode(step, request, slab)

    def _send(self, step: int, pushes: dict[int, Bytes], pulls: dict[int, Bytes], pulled: Request | None) -> Pull:
        """Sends pushes, each with the pull to the same server behind it, whose answer then acknowledges both."""
        pull = Pull(pulled if pulled is not None else self._no_request, Kind.PULL, self, [])
        pending = self._unacknowledged[step] = _Unacknowledged(pushes, pull)
        self.next_push = step + 1
        for server, message in pushes.items():
            then = pulls.get(server)
            future = self._transport.send(server, message, then, timeout_s=self.timeout_s)
            (pending.futures if then is None else pull._futures).append((server, future))
        return pull

    def _fitted(self, request: Request, grads: Mapping[str, Rows]) -> tuple[Request, RowSlab]:
        """The gradients as a slab, and the request of just the tables they are of."""
        if isinstance(grads, RowSlab) and grads.layout.same(request.ids.layout) and len(grads) == len(request.ids):
            return request, grads
        for name, grad_UD in grads.items():
            if name not in request.ids:
                raise ProtocolError(f"gradients of table {name}, which the request has no ids of")
            expected = (request.ids[name].size, self.tables[name].dim)
            if grad_UD.shape != expected or grad_UD.dtype != np.float32 or not grad_UD.flags.c_contiguous:
                raise ProtocolError(
                    f"table {name}: {grad_UD.dtype} gradients {grad_UD.shape}; expected contiguous float32 {expected}"
                )
        if set(grads) != set(request.ids):
            request = self.request({name: request.ids[name] for name in grads})
        return request, RowSlab.of_arrays(request.ids, grads)

    def _selected(self, request: Request, grads: RowSlab) -> tuple[Request, RowSlab]:
        """The rows worth sending, of each table."""
        kept = {name: select_rows(grad_UD, self._keep_rows) for name, grad_UD in grads.items()}
        request = self.request({name: request.ids[name][kept_K] for name, kept_K in kept.items()})
        return request, RowSlab.of_arrays(request.ids, {name: grads[name][kept_K] for name, kept_K in kept.items()})

    def _encode(self, step: int, request: Request, grads: RowSlab) -> dict[int, Bytes]:
        """One packed push per server."""
        message = grads.message
        if (
            message is not None
            and message.step == step
            and np.array_equal(message.ids_area.view(np.int64), request.ids.ids_V)  # not of another request
        ):
            self._count("push", message)
            return {0: message.buffer}
        layout, codec = request.ids.layout, self._push_codec
        encoded = values.encode(codec, grads.flat, np.diff(layout.starts_T1), None, self._catalog)
        self.saturated_values += saturated_values(codec, encoded)
        messages: dict[int, Bytes] = {}
        for server in range(self.num_servers):
            message = self._push_message(step, request, server)
            request.split.take_rows(server, layout, encoded, self._widths_T, message.values_area)
            self._count("push", message)
            messages[server] = message.buffer
        return messages

    def _push_message(self, step: int, request: Request, server: int) -> Packed:
        """A push with its ids, and room for the values."""
        tables_S, rows_S = _sections(request, server)
        message = self._allocate(
            Kind.PUSH,
            step,
            tables_S=tables_S,
            rows_S=rows_S,
            id_bytes_S=8 * rows_S,
            value_bytes_S=rows_S * self._widths_T[tables_S],
            value_formats_S=self._push_codec.tag,
        )
        message.ids_area.view(np.int64)[:] = request.split.ids_of(server, request.ids.ids_V)
        return message

    def wait_acknowledged(self) -> None:
        """Blocks until every push is acknowledged. Raises what `Pull.result` raises."""
        for step in sorted(self._unacknowledged):
            self._settle(step)

    def _wait_for_window(self, step: int) -> None:
        for earlier in sorted(self._unacknowledged):
            if earlier <= step - self._consistency.window or self._unacknowledged[earlier].done():
                self._settle(earlier)

    def _settle(self, step: int) -> None:
        pending = self._unacknowledged[step]
        for server, future in pending.futures:
            self._count("push", self._answer(server, future, Kind.ACK))
        if not pending.pull.received:
            for server, future in pending.pull._futures:
                self._answer(server, future, Kind.ROWS)
        del self._unacknowledged[step]

    # ---- questions ----

    def ask(self, question: Mapping[str, Any], *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Asks every server a question in JSON; their answers in order of the servers. `timeout_s` replaces the
        deadline for this one call.

        Raises DeadlineExceeded, TransportError, or RemoteError when a server refuses or fails."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        text = json.dumps(dict(question))
        packed = text_message(Kind.ASK, text, generation=self._generation, rank=self.rank)
        futures = [self._transport.send(s, packed, timeout_s=limit_s) for s in range(self.num_servers)]
        concurrent.futures.wait(futures, timeout=limit_s + 1.0)  # all, also where one has failed: none works on unseen
        answers = [self._answer(s, f, Kind.ANSWER, limit_s) for s, f in enumerate(futures)]
        return [json.loads(text_of(unpack(answer.buffer))) for answer in answers]

    def _answer(self, server: int, future: Future[Bytes], expected: Kind, limit_s: float | None = None) -> Packed:
        packed = wait(future, peer=f"server {server}", timeout_s=(self.timeout_s if limit_s is None else limit_s) + 1.0)
        try:
            answer = read(packed)
        except CorruptMessage as error:
            raise CorruptMessage(f"server {server} answered {error}") from error
        if answer.kind is Kind.ERROR:
            raise RemoteError(f"server {server}: {text_of(unpack(packed))}")
        if answer.kind is not expected:
            raise ProtocolError(f"server {server} answered {answer.kind.name}, expected {expected.name}")
        return answer

    def _count(self, direction: str, message: Packed) -> None:
        self.ledger.add(direction, "ids", int(message.id_bytes_S.sum()))
        self.ledger.add(direction, "values", int(message.value_bytes_S.sum()))
        self.ledger.add(direction, "framing", message.overhead)


def _sections(request: Request, server: int) -> tuple[Ids, Ids]:
    """The tables of which a server holds ids of the request, and how many."""
    counts_T = request.split.counts_ST[server]
    tables_S = np.flatnonzero(counts_T)
    return tables_S, counts_T[tables_S]


def _told(tables_S: Ids, rows_S: Ids) -> str:
    """Rows of tables, in words; the first few."""
    shown = ", ".join(f"{rows} of table {table}" for table, rows in zip(tables_S[:4], rows_S[:4], strict=True))
    return f"rows of {tables_S.size} tables" + (f" ({shown}{', ...' if tables_S.size > 4 else ''})" if shown else "")
