"""Pulls of one worker: sends a step's ids to servers and returns the rows of the replies in the order of the ids.

With a cache it requests only the rows that it lacks. Sends no gradients.
"""
# S = sections, V = requested ids, D = embedding dim

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from shardkeep.base.arrays import Bools, Bytes, Floats, Ids, Ints, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.ps.client.calls import Replies, ServerCalls
from shardkeep.ps.client.request import Cache, Fetch, Request
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedRows
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.ps.wire.ids import read_row_bits, write_ids
from shardkeep.ps.wire.message import MAX_PULLS, Kind, Packed
from shardkeep.ps.wire.rows import RowReader


class AbsentRows:
    """Adds initial rows to replies that leave out the rows that no server has. `seed`: of the job."""

    def __init__(self, tables: Sequence[TableSpec], catalog: Catalog, *, seed: int) -> None:
        self._initials = [Initial(spec.init, seed=seed, name=spec.name) for spec in tables]
        self._catalog = catalog

    def filled_in(self, reply: Packed, flat: Floats, ids_V: Ids, rows_S: Ints) -> Floats:
        """All requested rows, flat: those of the reply, `flat`, and the absent ones. Raises CorruptMessage."""
        there_V, ends_S = read_row_bits(reply, rows_S), np.cumsum(rows_S)
        if not np.array_equal(np.diff(np.append(0, np.cumsum(there_V))[np.append(0, ends_S)]), reply.rows_S):
            raise CorruptMessage(f"{reply.rows_S.sum()} rows, and bits of {np.count_nonzero(there_V)}")
        dims_S = self._catalog.dims_T[reply.tables_S]
        there_values = np.repeat(there_V, np.repeat(dims_S, rows_S))
        full = np.empty(there_values.size, dtype=np.float32)
        full[there_values] = flat
        at = 0
        for table, end, rows, dim in zip(
            reply.tables_S.tolist(), ends_S, rows_S.tolist(), dims_S.tolist(), strict=True
        ):
            absent, rows_UD = np.flatnonzero(~there_V[end - rows : end]), full[at : at + rows * dim].reshape(rows, dim)
            rows_UD[absent] = self._initials[table].rows(ids_V[end - rows : end][absent], dim)
            at += rows * dim
        return full


@dataclass(slots=True)
class PullHandle:
    """A pull in flight, and its handle in the push that answers it. `result` blocks until its rows have arrived."""

    fetch: Fetch
    kind: Kind
    _puller: PullSender
    number: int = 0
    """Its number among the pulls of its step, from 1 on; 0 = no push names it, and servers do not remember it."""
    futures: list[tuple[int, Future[Bytes]]] = field(default_factory=list)
    """The replies, by server."""
    received: bool = False
    """Whether `result` has returned them."""
    staleness: int = 0
    """Steps by which the rows lag behind, the largest over all servers; valid after `result`."""
    has_row_V: Bools | None = None
    """Whether each id of a READ has a row on its server; valid after `result`."""

    @property
    def request(self) -> Request:
        return self.fetch.request

    def result(self) -> JaggedRows:
        """Rows (U, D) per table, in the order of the request's ids.

        Raises DeadlineExceeded, TransportError or RemoteError."""
        return self._puller.receive(self)


class PullSender:
    """Sends one worker's pulls and reads, and receives their rows. Not thread safe."""

    def __init__(
        self,
        calls: ServerCalls,
        reader: RowReader,
        *,
        sync: bool,
        window: int,
        cache: Cache | None,
        absent: AbsentRows | None,
        replies: Replies,
    ) -> None:
        """`sync`: a pull goes to every server. `window`: most steps under way. `absent`: ids are coded, and servers
        leave out rows that they lack; None = neither. `replies`: waits for the replies to a step's pull."""
        self.cache = cache
        """Rows that need no pull; None = every row is requested."""
        self.staleness_seen: dict[int, int] = {}
        """Number of pulls by the staleness of their rows."""
        self.num_values = 0
        """Values of the rows of all steps so far, from a cache or from servers; those of a step that is pulled again
        after `forget` count once."""
        self._pulled_until = self._counted_until = 0
        self._calls = calls
        self._replies = replies
        self._reader = reader
        self._sync = sync
        self._window = window
        self._absent = absent
        self._numbers: dict[int, int] = {}  # the last number given, by step, until it is pushed

    def forget(self) -> None:
        """Forgets pulls in flight: their replies will not come, and their steps are pulled again."""
        self._counted_until = self._pulled_until
        self._numbers.clear()
        if self.cache is not None:
            self.cache.forget()

    def send(self, kind: Kind, step: int, request: Request, *, for_push: bool = True) -> PullHandle:
        """Requests the rows; returns immediately. `for_push`: whether a push may name the pull."""
        pull = self.prepared(kind, step, request, for_push=for_push)
        messages = self.messages(pull, step)
        pull.futures = [(server, self._calls.send(server, message)) for server, message in messages.items()]
        return pull

    def prepared(self, kind: Kind, step: int, request: Request, *, for_push: bool = True) -> PullHandle:
        """A pull whose messages are not sent yet."""
        pull = PullHandle(Fetch(step, request, request), kind, self)
        if kind is not Kind.PULL or not request.ids:
            return pull
        if step >= self._counted_until:  # a step of a user's own loop may have several pulls
            self._pulled_until = max(self._pulled_until, step + 1)
            self.num_values += request.ids.layout.num_values
        if self.cache is not None:
            pull.fetch = self.cache.fetch(step, request, pull.result)
        if for_push and (step in self._numbers or len(self._numbers) < self._window):
            number = self._numbers[step] = self._numbers.get(step, 0) + 1
            pull.number = number if number <= MAX_PULLS else 0
        return pull

    def messages(self, pull: PullHandle, step: int) -> dict[int, Bytes]:
        """One message to each server that holds an id of the pull; in `sync` a pull goes to every server."""
        messages: dict[int, Bytes] = {}
        missing = pull.fetch.missing
        for server in range(self._calls.num_servers):
            if not missing.split.count(server) and not (pull.kind is Kind.PULL and self._sync):
                continue
            ids_V = missing.split.ids_of(server, missing.ids.ids_V)
            ids = write_ids(missing.split.counts_ST[server], ids_V, coded=self._absent is not None)
            message = self._calls.allocate(pull.kind, step, value=pull.number, **ids.directory)
            message.ids_area[:] = ids.area
            messages[server] = message.buffer
        return messages

    def pushed(self, step: int) -> None:
        """A step is pushed: no later push names its pulls, or those of the steps before."""
        self._numbers = {later: number for later, number in self._numbers.items() if later > step}

    def receive(self, pull: PullHandle) -> JaggedRows:
        """As `PullHandle.result`."""
        if pull.fetch.answer is not None and pull.fetch.flat is not None:  # for a pull that borrows from it
            return JaggedRows(pull.request.ids.layout, pull.fetch.flat, pull.request.ids.names)
        missing, layout = pull.fetch.missing, pull.fetch.missing.ids.layout
        flat: Rows | None = None
        stalest = 0
        if pull.kind is Kind.READ:
            pull.has_row_V = np.zeros(missing.ids.ids_V.size, np.bool_)
        replies = self._replies if pull.kind is Kind.PULL and pull.request.ids else self._calls.replies
        for server, reply in replies(pull.futures, Kind.ROWS):
            part = self._decode(server, reply, missing, reads=pull.kind is Kind.READ)
            if pull.has_row_V is not None:
                positions_K = missing.split.positions(server)
                pull.has_row_V[slice(None) if positions_K is None else positions_K] = read_row_bits(reply, reply.rows_S)
            if part.size == layout.num_values and part.flags.writeable:
                flat = part  # all of it: no copy
            else:
                flat = np.empty(layout.num_values, dtype=np.float32) if flat is None else flat
                missing.split.put_rows(server, layout, part, flat)
            stalest = max(stalest, reply.value)
        pull.staleness, pull.received = stalest, True
        if pull.kind is Kind.PULL and missing.ids:
            self.staleness_seen[stalest] = self.staleness_seen.get(stalest, 0) + 1
        flat = np.empty(0, dtype=np.float32) if flat is None else flat
        if pull.fetch.flat is not None and self.cache is not None:
            flat = self.cache.fill(pull.fetch, flat)
        return JaggedRows(pull.request.ids.layout, flat, pull.request.ids.names)

    def _decode(self, server: int, reply: Packed, request: Request, *, reads: bool) -> Rows:
        """The rows of one reply, flat. Raises CorruptMessage if they are not the requested ones."""
        counts_T = request.split.counts_ST[server]
        tables_S = np.flatnonzero(counts_T)
        rows_S = counts_T[tables_S]
        absent = None if reads else self._absent
        complete = (absent is not None and reply.rows_S.size == rows_S.size) or np.array_equal(reply.rows_S, rows_S)
        if not (np.array_equal(reply.tables_S, tables_S) and complete):
            raise CorruptMessage(
                f"server {server} answered {_shown(reply.tables_S, reply.rows_S)}, asked for {_shown(tables_S, rows_S)}"
            )
        flat = self._reader.decode(reply)
        if absent is not None:
            return absent.filled_in(reply, flat, request.split.ids_of(server, request.ids.ids_V), rows_S)
        if not reads and (reply.ids_area.size or reply.id_formats_S.any()):
            raise CorruptMessage(
                f"server {server} answered a pull with {reply.ids_area.size} bytes of ids; allowed: none"
            )
        return flat


def _shown(tables_S: Ids, rows_S: Ids) -> str:
    """Rows of tables, in words; the first few."""
    shown: Sequence[str] = [f"{rows} of table {table}" for table, rows in zip(tables_S[:4], rows_S[:4], strict=True)]
    more = ", ..." if tables_S.size > 4 else ""
    return f"rows of {tables_S.size} tables" + (f" ({', '.join(shown)}{more})" if shown else "")
