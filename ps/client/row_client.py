"""Pull and push as a worker sees them: ids and rows in, rows out; one message per server and step.

Does not deduplicate, pool or know batches (workers/embeddings/layer.py), and knows no sockets (ps/transport).
"""
# U = unique ids of a table in a step, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardkeep.base.arrays import Ids, Rows
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.absent_rows import AbsentRows
from shardkeep.ps.client.admin import AdminClient
from shardkeep.ps.client.calls import ServerCalls
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.pull import Pull, Puller
from shardkeep.ps.client.push import Pusher
from shardkeep.ps.client.push_messages import PushWriter
from shardkeep.ps.client.request import Cache, Request
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from shardkeep.ps.placement import split
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.message import Kind

__all__ = ["Ids", "Pull", "RowClient", "Rows"]


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
        consistency = consistency or ConsistencyConfig()
        compression = compression or CompressionConfig()
        self._catalog = catalog = Catalog(tables)
        self._sync = consistency.mode == "sync"
        self.tables = {spec.name: spec for spec in tables}
        self.calls = ServerCalls(transport, rank=rank, generation=generation, timeout_s=timeout_s)
        self.admin = AdminClient(self.calls.admin_replies)
        self.memory = RowMemory(catalog, compression, history=history, num_workers=num_workers)
        """Unsent gradients, and rows read before."""
        self.compressor = Compressor(catalog, compression.push, self.memory, seed=seed, rank=rank)
        coded, window = compression.ids == "coded", consistency.window
        self.cache: Cache | None = None
        """Spares pulls; None = every row of a step is asked for."""
        if self.memory.caches:
            lease = compression.pull.lease
            self.cache = Cache(self.memory, lease=lease, window=window, num_servers=self.num_servers)
        absent = AbsentRows(tables, catalog, seed=seed) if coded else None
        self._pulls = Puller(self.calls, catalog, sync=self._sync, cache=self.cache, absent=absent)
        self.staleness_seen = self._pulls.staleness_seen
        """Pulls by the staleness of their rows."""
        elements = compression.push.keep_values is not None
        writer = PushWriter(
            catalog, self.compressor.format, num_servers=self.num_servers, coded=coded, elements=elements
        )
        self.pushes = Pusher(self.calls, self._pulls, writer, self.compressor, window=window)

    def regroup(self, transport: Transport, generation: int, step: int) -> None:
        """Goes on over another generation's transport, to as many servers, at `step`. What was not acknowledged is
        forgotten: whoever calls this pushes all steps from `step` on again, and servers ignore what they have."""
        self.calls.regroup(transport, generation)
        self._pulls.forget()
        self.pushes.restart(step)
        self.memory.rewind(step)

    @property
    def rank(self) -> int:
        return self.calls.rank

    @property
    def num_servers(self) -> int:
        return self.calls.num_servers

    def held_back(self) -> dict[str, float]:
        """What compression has kept from the wire, in numbers; {} = it keeps nothing."""
        found = self.memory.report() if self.memory.sends_later else {}
        if self.cache is not None:
            found |= {"cache_hits": self.cache.hits, "cache_misses": self.cache.misses}
        return found

    def request(self, ids: Mapping[str, Ids]) -> Request:
        """Places each table's ids (int64, sorted, unique) on servers. Pure; may run in another thread.

        Raises ProtocolError for ids of another type or of a table that is not there."""
        if not (isinstance(ids, JaggedIds) and ids.layout.catalog.same(self._catalog)):
            ids = JaggedIds.of_arrays(self._catalog, ids)
        return Request(ids, split(ids, self.num_servers))

    def pull(self, step: int, request: Request) -> Pull:
        """Asks for the rows that step `step` uses; returns at once, except in `sync`, which first waits until
        every server has acknowledged this rank's earlier pushes."""
        if self._sync:
            self.wait_acknowledged()
        return self._pulls.send(Kind.PULL, step, request)

    def read(self, request: Request) -> Pull:
        """Asks for rows as they are now, without any promise of order (evaluation)."""
        return self._pulls.send(Kind.READ, 0, request)

    def fence(self, step: int) -> None:
        """Blocks until the servers have applied all that this rank pushed before `step`; in `sync`, all that every
        rank pushed (every rank must call it)."""
        self.wait_acknowledged()
        if self._sync:
            self._pulls.send(Kind.PULL, step, self.request({})).result()

    def gradients(self, step: int, request: Request) -> JaggedRows:
        """Zeros to add a step's gradients to, for the push of just this step and request. Where the push needs no other
        form, they already lie in its message: nobody may change them after the push."""
        return self.pushes.buffer(step, request)

    def push(self, step: int, request: Request, grads: Mapping[str, Rows], *, last: bool = False) -> None:
        """Sends the gradients (U, D) of the request's rows; returns without waiting for the acknowledgement,
        unless as many steps as the consistency mode allows are already unacknowledged.

        The gradients are encoded before this returns and may be reused by the caller. Tables may be left out. `last`:
        all gradients that earlier pushes left for later go along, but not what was rounded off of rows already sent.

        Raises ProtocolError when gradients do not fit the request or the step was pushed before; and what
        `Pull.result` raises, for an earlier push that failed."""
        messages = self.pushes.messages(step, request, grads, last=last)
        self.pushes.send(step, messages, {}, self._pulls.nothing())

    def exchange(
        self, step: int, request: Request, grads: Mapping[str, Rows], next_step: int, next_request: Request
    ) -> Pull:
        """`push`, then `pull` of another step; in one message per server where the mode allows it, for a call costs
        more than its bytes."""
        if self._sync and self.num_servers > 1:  # each must hold the push before any is pulled
            self.push(step, request, grads)
            return self.pull(next_step, next_request)
        messages = self.pushes.messages(step, request, grads)
        if self._sync:
            self.wait_acknowledged()
        pull = self._pulls.prepared(Kind.PULL, next_step, next_request)
        self.pushes.send(step, messages, self._pulls.messages(pull, next_step), pull)
        return pull

    def wait_acknowledged(self) -> None:
        """Blocks until every push is acknowledged. Raises what `Pull.result` raises."""
        self.pushes.wait_acknowledged()
