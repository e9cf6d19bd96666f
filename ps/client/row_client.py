"""Pull and push as a worker sees them: ids and rows in, rows out; one message per server and step.

Does not deduplicate, pool or know batches (workers/embeddings/layer.py), and knows no sockets (ps/transport).
"""
# U = unique ids of a table in a step, K = rows sent, D = embedding dim

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage, ProtocolError, RemoteError
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.admin import AdminClient
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.initial_rows import RowReader
from shardkeep.ps.client.push import PushWriter
from shardkeep.ps.client.request import Cache, Fetch, Request
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from shardkeep.ps.placement import split
from shardkeep.ps.transport.transport import Transport, wait
from shardkeep.ps.wire.ids import write_ids
from shardkeep.ps.wire.message import FLUSH, Bytes, Kind, Packed, allocate, read, text_message, text_of, unpack

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]


@dataclass(slots=True)
class Pull:
    """Rows on their way. `result` blocks until they are here."""

    request: Request
    fetch: Fetch
    """What of the request was asked for."""
    kind: Kind
    _client: RowClient
    _futures: list[tuple[int, Future[Bytes]]]
    received: bool = False
    """Whether `result` has returned them."""
    staleness: int = 0
    """Steps that the rows lag behind, the largest of all servers; valid after `result`."""

    def result(self) -> JaggedRows:
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

    Not thread safe, but for `request` and `admin`. Steps count from the job's start; each rank pushes once per step, to
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
        timeout_s: float = 30.0,
        seed: int = 0,
        history: int = 0,
        num_workers: int = 1,
    ) -> None:
        """`seed`: of initial values and of stochastic rounding; `history`: steps that `regroup` can go back;
        `num_workers`: of the job."""
        self.tables = {spec.name: spec for spec in tables}
        self.rank = rank
        self.timeout_s = timeout_s
        self.allowance_s = 0.0
        """Seconds more that a pull, push or question may take for now."""
        self.staleness_seen: dict[int, int] = {}
        self.admin = AdminClient(self._admin_replies)
        self._catalog = Catalog(tables)
        self._transport = transport
        self._generation = generation
        self._consistency = consistency if consistency is not None else ConsistencyConfig()
        compression = compression if compression is not None else CompressionConfig()
        self._coded = compression.ids == "coded"
        self._reader = RowReader(tables, self._catalog, seed=seed)
        self.memory = RowMemory(self._catalog, compression, history=history, num_workers=num_workers)
        """Unsent gradients, and rows read before."""
        self._compressor = Compressor(self._catalog, compression.push, self.memory, seed=seed, rank=rank)
        self._writer = PushWriter(
            self._catalog,
            self._compressor.format,
            num_servers=transport.num_servers,
            coded=self._coded,
            elements=compression.push.keep_values is not None,
        )
        self.cache: Cache | None = None
        """Spares pulls; None = every row of a step is asked for."""
        if self.memory.caches:
            self.cache = Cache(
                self.memory,
                lease=compression.pull.lease,
                window=self._consistency.window,
                num_servers=transport.num_servers,
            )
        self._fetches: dict[int, Fetch] = {}  # by step, until it is pushed
        self._unacknowledged: dict[int, _Unacknowledged] = {}
        self.next_push = 0
        """The step after the last one whose push was handed over to be sent."""
        self._no_request = self.request({})

    def regroup(self, transport: Transport, generation: int, step: int) -> None:
        """Goes on over another generation's transport, to as many servers, at `step`. What was not acknowledged is
        forgotten: whoever calls this pushes all steps from `step` on anew, and servers tell what they have already."""
        self._transport, self._generation = transport, generation
        self._unacknowledged.clear()
        self._fetches.clear()
        self.memory.rewind(step)
        if self.cache is not None:
            self.cache.forget()
        self.next_push = step

    @property
    def num_servers(self) -> int:
        return self._transport.num_servers

    @property
    def _limit_s(self) -> float:
        return self.timeout_s + self.allowance_s

    @property
    def saturated_values(self) -> int:
        """Gradient values sent as the largest number of a 16-bit push format, because they were beyond its range."""
        return self._compressor.saturated_values

    def held_back(self) -> dict[str, float]:
        """What compression has kept from the wire, in numbers; {} = it keeps nothing."""
        found = self.memory.report() if self.memory.sends_later else {}
        if self.cache is not None:
            found |= {"cache_hits": self.cache.hits, "cache_misses": self.cache.misses}
        return found

    @property
    def push_format(self) -> str:
        """The number format of pushed gradients, as the config names it."""
        return self._compressor.format.codec.name

    # ---- pull ----

    def request(self, ids: Mapping[str, Ids]) -> Request:
        """Places each table's ids (int64, sorted, unique) on servers. Pure; may run in another thread.

        Raises ProtocolError for ids of another type or of a table that is not there."""
        if not (isinstance(ids, JaggedIds) and ids.layout.catalog.same(self._catalog)):
            ids = JaggedIds.of_arrays(self._catalog, ids)
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
        fetch = self._ask(kind, step, request)
        send = self._transport.send
        messages = self._pull_messages(kind, step, fetch.missing)
        futures = [(server, send(server, message, timeout_s=self._limit_s)) for server, message in messages.items()]
        return Pull(request, fetch, kind, self, futures)

    def _ask(self, kind: Kind, step: int, request: Request) -> Fetch:
        """What of a request goes to the servers."""
        if kind is not Kind.PULL or not request.ids:
            return Fetch(step, request, request)
        fetch = Fetch(step, request, request) if self.cache is None else self.cache.ask(step, request)
        self._fetches[step] = fetch
        return fetch

    def _pull_messages(self, kind: Kind, step: int, request: Request) -> dict[int, Bytes]:
        """One message to each server that holds an id of the request; in `sync` a pull goes to every server."""
        messages: dict[int, Bytes] = {}
        for server in range(self.num_servers):
            if not request.split.count(server) and not (kind is Kind.PULL and self._consistency.mode == "sync"):
                continue
            wanted = request.split.ids_of(server, request.ids.ids_V)
            ids = write_ids(request.split.counts_ST[server], wanted, coded=self._coded)
            message = self._allocate(kind, step, **ids.directory)
            message.ids_area[:] = ids.area
            messages[server] = message.buffer
        return messages

    def _allocate(self, kind: Kind, step: int, **directory: Any) -> Packed:
        return allocate(kind, generation=self._generation, rank=self.rank, step=step, **directory)

    def _receive(self, pull: Pull) -> JaggedRows:
        request, layout = pull.fetch.missing, pull.fetch.missing.ids.layout
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
        pull.staleness, pull.received = seen, True
        if pull.kind is Kind.PULL and request.ids:
            self.staleness_seen[seen] = self.staleness_seen.get(seen, 0) + 1
        flat = np.empty(0, dtype=np.float32) if flat is None else flat
        if pull.fetch.flat is not None and self.cache is not None:
            flat = self.cache.fill(pull.fetch, flat)
        return JaggedRows(pull.request.ids.layout, flat, pull.request.ids.names)

    def _decode(self, server: int, answer: Packed, request: Request) -> Rows:
        """The rows of one answer, flat; checked to be those that were asked for."""
        counts_T = request.split.counts_ST[server]
        tables_S = np.flatnonzero(counts_T)
        rows_S = counts_T[tables_S]
        rows = answer.rows_S
        fits = (rows <= rows_S).all() if self._coded and rows.size == rows_S.size else np.array_equal(rows, rows_S)
        if not (np.array_equal(answer.tables_S, tables_S) and fits):
            raise CorruptMessage(
                f"server {server} answered {_told(answer.tables_S, answer.rows_S)}, asked for {_told(tables_S, rows_S)}"
            )
        return self._reader.read(answer, request.split.ids_of(server, request.ids.ids_V), rows_S)

    # ---- push ----

    def gradients(self, step: int, request: Request) -> JaggedRows:
        """Zeros to add a step's gradients to, for the push of just this step and request. Where the push needs no other
        form, they already lie in its message: nobody may change them after the push."""
        if self.num_servers > 1 or self._coded or not self._compressor.plain:
            return JaggedRows.zeros(request.ids)
        ids = write_ids(request.split.counts_ST[0], request.ids.ids_V, coded=False)
        message = self._allocate(
            Kind.PUSH,
            step,
            **ids.directory,
            value_formats_S=self._compressor.format.tag,
            value_bytes_S=4 * ids.rows_S * self._catalog.dims_T[ids.tables_S],
        )
        message.ids_area[:] = ids.area
        flat = message.values_area.view(np.float32)
        flat[:] = 0.0
        return JaggedRows(request.ids.layout, flat, request.ids.names, message)

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
        fetch = self._ask(Kind.PULL, next_step, next_request)
        pulls = self._pull_messages(Kind.PULL, next_step, fetch.missing)
        return self._send(step, messages, pulls, fetch)

    def push(self, step: int, request: Request, grads: Mapping[str, Rows], *, last: bool = False) -> None:
        """Sends the gradients (U, D) of the request's rows; returns without waiting for the acknowledgement,
        unless as many steps as the consistency mode allows are already unacknowledged.

        The gradients are encoded before this returns and may be reused by the caller. Tables may be left out. `last`:
        all gradients that earlier pushes left for later go along, but not what was rounded off of rows already sent.

        Raises ProtocolError when gradients do not fit the request or the step was pushed before; and what
        `Pull.result` raises, for an earlier push that failed."""
        self._send(
            step, self._messages(step, request, grads, last=last), {}, Fetch(step, self._no_request, self._no_request)
        )

    def _messages(
        self, step: int, request: Request, grads: Mapping[str, Rows], *, last: bool = False
    ) -> dict[int, Bytes]:
        """A step's pushes by server, as soon as the window of unacknowledged steps has room for them."""
        if step in self._unacknowledged:
            raise ProtocolError(f"step {step} was pushed before and is not acknowledged yet; a step is pushed once")
        request, jagged = self._fitted(request, grads)
        self._wait_for_window(step)
        return self._encode(step, request, jagged, last)

    def _send(self, step: int, pushes: dict[int, Bytes], pulls: dict[int, Bytes], fetch: Fetch) -> Pull:
        """Sends pushes, each with the pull to the same server behind it, whose answer then acknowledges both."""
        pull = Pull(fetch.request, fetch, Kind.PULL, self, [])
        pending = self._unacknowledged[step] = _Unacknowledged(pushes, pull)
        self.next_push = step + 1
        for server, message in pushes.items():
            then = pulls.get(server)
            future = self._transport.send(server, message, then, timeout_s=self._limit_s)
            (pending.futures if then is None else pull._futures).append((server, future))
        return pull

    def _fitted(self, request: Request, grads: Mapping[str, Rows]) -> tuple[Request, JaggedRows]:
        """The gradients as jagged rows, and the request of just the tables they are of."""
        if isinstance(grads, JaggedRows) and grads.layout.same(request.ids.layout) and len(grads) == len(request.ids):
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
        return request, JaggedRows.of_arrays(request.ids, grads)

    def _encode(self, step: int, request: Request, grads: JaggedRows, last: bool) -> dict[int, Bytes]:
        """One packed push per server."""
        fetch, message = self._fetches.pop(step, None), grads.message
        if (
            message is not None
            and message.step == step
            and np.array_equal(message.ids_area.view(np.int64), request.ids.ids_V)  # not of another request
        ):
            return {0: message.buffer}
        packed = self._compressor.pack(step, request.ids, grads, last=last)
        value = FLUSH if last and self.memory.sends_later else 0

        def allocate(**directory: Any) -> Packed:
            return self._allocate(Kind.PUSH, step, value=value, **directory)

        messages = self._writer.write(packed, request, fetch, allocate)
        return {server: packed.buffer for server, packed in enumerate(messages)}

    def wait_acknowledged(self) -> None:
        """Blocks until every push is acknowledged. Raises what `Pull.result` raises."""
        for step in sorted(self._unacknowledged):
            self._settle(step)

    def acknowledged_within(self, limit_s: float) -> bool:
        """Whether every push is acknowledged; blocks up to `limit_s` seconds."""
        pushes = self._unacknowledged.values()
        futures = [future for push in pushes for _, future in [*push.futures, *push.pull._futures]]
        return not concurrent.futures.wait(futures, timeout=limit_s).not_done

    def _wait_for_window(self, step: int) -> None:
        for earlier in sorted(self._unacknowledged):
            if earlier <= step - self._consistency.window or self._unacknowledged[earlier].done():
                self._settle(earlier)

    def _settle(self, step: int) -> None:
        pending = self._unacknowledged[step]
        for server, future in pending.futures:
            self._answer(server, future, Kind.ACK)
        if not pending.pull.received:
            for server, future in pending.pull._futures:
                self._answer(server, future, Kind.ROWS)
        del self._unacknowledged[step]

    # ---- questions ----

    def _admin_replies(self, text: str, timeout_s: float | None) -> list[str]:
        """Sends the text of an admin call to every server; their replies in order of the servers. `timeout_s` replaces
        the deadline for this one call."""
        limit_s = self._limit_s if timeout_s is None else timeout_s
        packed = text_message(Kind.ASK, text, generation=self._generation, rank=self.rank)
        futures = [self._transport.send(s, packed, timeout_s=limit_s) for s in range(self.num_servers)]
        concurrent.futures.wait(futures, timeout=limit_s + 1.0)  # all, also where one has failed: none works on unseen
        answers = [self._answer(s, f, Kind.ANSWER, limit_s) for s, f in enumerate(futures)]
        return [text_of(unpack(answer.buffer)) for answer in answers]

    def _answer(self, server: int, future: Future[Bytes], expected: Kind, limit_s: float | None = None) -> Packed:
        packed = wait(future, peer=f"server {server}", timeout_s=(self._limit_s if limit_s is None else limit_s) + 1.0)
        try:
            answer = read(packed)
        except CorruptMessage as error:
            raise CorruptMessage(f"server {server} answered {error}") from error
        if answer.kind is Kind.ERROR:
            raise RemoteError(f"server {server}: {text_of(unpack(packed))}")
        if answer.kind is not expected:
            raise ProtocolError(f"server {server} answered {answer.kind.name}, expected {expected.name}")
        return answer


def _told(tables_S: Ids, rows_S: Ids) -> str:
    """Rows of tables, in words; the first few."""
    shown = ", ".join(f"{rows} of table {table}" for table, rows in zip(tables_S[:4], rows_S[:4], strict=True))
    return f"rows of {tables_S.size} tables" + (f" ({shown}{', ...' if tables_S.size > 4 else ''})" if shown else "")
