"""RowClient: a worker's pulls and pushes, one message per server and step.

It neither deduplicates nor pools (workers/embeddings/layer.py), and knows no batches and no sockets (ps/transport).
"""
# U = unique ids of a table in a step, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardkeep.base.arrays import Ids, Rows
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.per_table import push_of
from shardkeep.compression.selection.registry import selector_of
from shardkeep.ps.client.calls import ReplyWaits, ServerCalls
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.pull import AbsentRows, PullHandle, PullSender
from shardkeep.ps.client.push import Grads, PullHandles, Pusher, PushWriter
from shardkeep.ps.client.request import Cache, Request
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from shardkeep.ps.placement import split
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.message import Kind
from shardkeep.ps.wire.rows import RowReader

__all__ = ["Ids", "PullHandle", "RowClient", "Rows"]


class RowClient:
    """One worker's access to all embedding servers.

    Not thread safe, except `request` and `calls.ask`. Steps count from the job's start; each rank pushes once per step,
    to every server (an empty message if it has no rows), and pulls a step before it pushes it.
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
        patience_s: float = 0.0,
        seed: int = 0,
        history: int = 0,
        num_workers: int = 1,
        measures_waits: bool = False,
        import_from: Path | None = None,
    ) -> None:
        """`patience_s`: seconds more for a reply, where the transport itself ends a call (`LastingTransport`); `seed`:
        for initial values and draws; `history`: steps by which `regroup` can go back; `num_workers`: of the job;
        `measures_waits`: for `waits`; `import_from`: folder that is searched last for plugs.

        Raises ConfigError for a plug that cannot be loaded."""
        consistency = consistency or ConsistencyConfig()
        compression = compression or CompressionConfig()
        self._catalog = catalog = Catalog(tables)
        self.reader = reader = RowReader(catalog, compression, import_from)
        """Reads the rows of messages."""
        self._sync = consistency.mode == "sync"
        self.tables = {spec.name: spec for spec in tables}
        self.calls = ServerCalls(
            transport, rank=rank, generation=generation, timeout_s=timeout_s, patience_s=patience_s
        )
        pushes_T = [push_of(spec.compression, compression.push, frozen=spec.freeze) for spec in tables]
        selector = selector_of(compression.push.select, import_from) if compression.push.pool_rows else None
        self.memory = RowMemory(
            catalog, compression, selector, history=history, seed=seed, num_workers=num_workers, pushes_T=pushes_T
        )
        """Residuals and cached rows."""
        self.compressor = Compressor(reader, compression.push, self.memory, pushes_T=pushes_T, seed=seed, rank=rank)
        coded, window = compression.ids == "coded", consistency.window
        lease, cache = compression.pull.lease, None
        if self.memory.caches:
            cache = Cache(self.memory, lease=lease, window=window, num_servers=self.num_servers)
        self.waits = ReplyWaits(self.calls) if measures_waits else None
        """Time that steps have waited for servers; None = it is not measured."""
        replies = self.calls.replies if self.waits is None else self.waits.replies
        self.pulls = PullSender(
            self.calls,
            reader,
            sync=self._sync,
            window=window,
            cache=cache,
            absent=AbsentRows(tables, catalog, seed=seed) if coded else None,
            replies=replies,
        )
        self._fenced = 0  # in sync: the servers have applied all steps before this one
        writer = PushWriter(self.compressor.formats, num_servers=self.num_servers, coded=coded)
        self._frozen = frozen = frozenset(spec.name for spec in tables if spec.freeze)
        self.pushes = Pusher(
            self.calls, self.pulls, writer, self.compressor, window=window, frozen=frozen, replies=replies
        )

    def regroup(self, transport: Transport, generation: int, step: int) -> None:
        """Continues over another generation's transport, to as many servers, at `step`. Forgets what was not
        acknowledged: the caller pushes all steps from `step` on again, and servers drop what they have."""
        self.calls.regroup(transport, generation)
        self.pulls.forget()
        self.pushes.restart(step)
        self._fenced = step
        self.memory.rewind(step)

    @property
    def rank(self) -> int:
        return self.calls.rank

    @property
    def generation(self) -> int:
        """The generation that it sends to."""
        return self.calls.generation

    @property
    def num_servers(self) -> int:
        return self.calls.num_servers

    def residuals_and_cache(self) -> dict[str, float]:
        """Counters of residuals and cache (in summary.json); {} = neither is used."""
        counters = self.memory.report() if self.memory.sends_later else {}
        if (cache := self.pulls.cache) is not None:
            counters |= {"cache_hits": cache.hits, "cache_misses": cache.misses}
        return counters

    def request(self, ids: Mapping[str, Ids]) -> Request:
        """Places each table's ids (int64, sorted, unique) on servers. Pure; may run in another thread.

        Raises ProtocolError for ids of another type or of an unknown table."""
        if not (isinstance(ids, JaggedIds) and ids.layout.catalog.same(self._catalog)):
            ids = JaggedIds.of_arrays(self._catalog, ids)
        return Request(ids, split(ids, self.num_servers))

    def pull(self, step: int, request: Request, *, for_push: bool = True) -> PullHandle:
        """Requests the rows of step `step`; returns immediately. In `sync` it first waits until every server has
        acknowledged this rank's earlier pushes. `for_push`: whether the push of the step may name this pull."""
        if self._sync:
            self.wait_acknowledged()
        for_push = for_push and not self._frozen.issuperset(request.ids)
        if (held := self.pushes.take_held()) is None:
            return self.pulls.send(Kind.PULL, step, request, for_push=for_push)
        pull = self.pulls.prepared(Kind.PULL, step, request, for_push=for_push)
        self.pushes.send(*held, self.pulls.messages(pull, step), pull)
        return pull

    def read(self, request: Request) -> PullHandle:
        """Requests rows as they are now, without a promise of order (evaluation)."""
        self.pushes.send_held()
        return self.pulls.send(Kind.READ, 0, request)

    def fence(self, step: int) -> None:
        """Blocks until the servers have applied all pushes of this rank before `step`. In `sync`: of every rank; it
        waits for pushes of slower ranks, and for no other call of theirs."""
        self.pushes.wait_acknowledged(in_step=False)
        if self._sync and step > self._fenced:
            for everywhere in (0, 1):
                message = self.calls.allocate(Kind.FENCE, step, value=everywhere).buffer
                futures = [(server, self.calls.send(server, message)) for server in range(self.num_servers)]
                for _ in self.calls.replies(futures, Kind.ACK):
                    pass
            self._fenced = step

    def gradients(self, step: int, request: Request) -> JaggedRows:
        """Returns zeros for the gradients of this step and request. They may be the buffer of the push message: do not
        change them after the push."""
        return self.pushes.buffer(step, request)

    def push(
        self,
        step: int,
        request: Request,
        grads: Grads,
        *,
        pulls: PullHandles = (),
        last: bool = False,
        lr_factor: float = 1,
        rides: bool = False,
    ) -> None:
        """Sends the gradients (U, D) of the request's rows; returns without waiting for the acknowledgement,
        unless as many steps as the consistency mode allows are already unacknowledged. Gradients of frozen tables are
        not sent.

        The gradients are encoded before this returns; the caller may reuse them. Tables may be left out. `pulls`: those
        that the push names, so that servers need not find their rows again. `last`: also
        sends all unsent gradients of earlier steps, but not the rounding errors of rows already sent.

        `lr_factor`: multiplies the row optimizers' learning rates in this update, as a schedule does; 1.2e-38 to
        3.4e38, rounded to float32. In `sync`, all ranks push the same factor at a step.

        `rides`: the next pull carries it in its call, or the next call of another kind sends it. Not in `sync`, where
        other ranks may wait for it.

        Raises ProtocolError if gradients do not fit the request, the step was pushed before or `lr_factor` is out of
        bounds, and what `PullHandle.result` raises if an earlier push failed."""
        messages = self.pushes.messages(step, request, grads, pulls, last=last, lr_factor=lr_factor)
        self.pushes.hold(step, messages)
        if not rides:
            self.pushes.send_held()

    def exchange(
        self,
        step: int,
        request: Request,
        grads: Grads,
        next_step: int,
        next_request: Request,
        *,
        pulls: PullHandles = (),
        lr_factor: float = 1.0,
    ) -> PullHandle:
        """`push`, then `pull` of another step, in one call per server if the mode allows it: a call costs more than its
        bytes."""
        if self._sync and self.num_servers > 1:  # each must hold the push before any is pulled
            self.push(step, request, grads, pulls=pulls, lr_factor=lr_factor)
            return self.pull(next_step, next_request)
        messages = self.pushes.messages(step, request, grads, pulls, lr_factor=lr_factor)
        if self._sync:
            self.wait_acknowledged()
        pull = self.pulls.prepared(Kind.PULL, next_step, next_request)
        self.pushes.send(step, messages, self.pulls.messages(pull, next_step), pull)
        return pull

    def wait_acknowledged(self) -> None:
        """Blocks until every push is acknowledged. Raises what `PullHandle.result` raises."""
        self.pushes.wait_acknowledged()
