"""Clients of one or more servers in this process, and handlers that record or hold their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.message import Kind, Packed, read
from shardkeep.ps.wire.rows import RowReader
from tests.support.messages import Message, pack, unpack
from tests.support.one_table import exported

Arrays = dict[str, np.ndarray]
TABLES = (
    TableSpec(name="user", dim=4),
    TableSpec(name="item", dim=3, optimizer={"name": "sgd", "lr": 1.0}, init={"name": "zeros"}),
)
SUMS: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 1.0}, "init": {"name": "zeros"}}
"""Of a table whose rows are minus the sums of their gradients."""


def servers_of(
    tables: Sequence[TableSpec], count: int = 1, *, mode: str = "bounded", **settings: Any
) -> list[ShardService]:
    settings = {"consistency": ConsistencyConfig(mode=mode), "num_workers": 1, "seed": 3} | settings
    return [ShardService(shard=shard, tables=tables, **settings) for shard in range(count)]


def services(count: int = 1, mode: str = "bounded", *, workers: int = 1, **compression: Any) -> list[ShardService]:
    return servers_of(TABLES, count, mode=mode, num_workers=workers, compression=CompressionConfig(**compression))


def metered(
    handlers: Sequence[Handler],
    traffic: WorkerTraffic,
    tables: Sequence[TableSpec] = TABLES,
    compression: CompressionConfig | None = None,
) -> MeteredTransport:
    rows = RowReader(Catalog(tables), compression or CompressionConfig())
    return MeteredTransport(LocalTransport(handlers), LedgerMeter(traffic), rows)


def connect(
    handlers: Sequence[Handler], mode: str = "bounded", traffic: WorkerTraffic | None = None, **settings: Any
) -> RowClient:
    transport = metered(
        handlers, WorkerTraffic() if traffic is None else traffic, compression=settings.get("compression")
    )
    return RowClient(transport, tables=TABLES, consistency=ConsistencyConfig(mode=mode), **settings)


class Recorded:
    """A server's handler that keeps all packets of both directions."""

    def __init__(self, service: ShardService) -> None:
        self.asked: list[Bytes] = []
        self.answered: list[Future[Bytes]] = []
        self._service = service

    def __call__(self, message: Bytes) -> Future[Bytes]:
        self.asked.append(message)
        self.answered.append(self._service.handle(message))
        return self.answered[-1]

    def sizes(self, kind: Kind) -> list[tuple[int, int]]:
        """Bytes of each packet of a kind and of its answer."""
        pairs = zip(self.asked, self.answered, strict=True)
        return [(asked.size, done.result(0).size) for asked, done in pairs if unpack(asked).kind is kind]

    def num_bytes(self, kind: Kind) -> int:
        return sum(map(sum, self.sizes(kind)))


class Held:
    """A server's handler that answers pushes, and only them, when told to."""

    def __init__(self, service: ShardService) -> None:
        self.pushes: list[tuple[int, Future[Bytes]]] = []
        self.pulls: list[int] = []
        self._service = service

    def __call__(self, message: Bytes) -> Future[Bytes]:
        header = unpack(message)
        answer = self._service.handle(message)
        if header.kind is not Kind.PUSH:
            self.pulls.append(header.step)
            return answer
        late: Future[Bytes] = Future()
        self.pushes.append((header.step, late))
        return late

    def acknowledge(self, step: int) -> None:
        for pushed, late in self.pushes:
            if pushed == step:
                late.set_result(pack(Message(Kind.ACK, 0, 0, step)))


# ---- a job with random rows and gradients ----

DIMS = {"big": 8, "small": 8, "wide": 6}


class Job:
    """Servers and workers. `messages` are what servers received.

    Args:
        own: Settings of single tables of `DIMS`.
        specs: The tables instead.
        handler: Makes the handler of a server; None = the service itself.
        journal: A folder for the servers' journals.
        compression: Settings of all tables.
    """

    def __init__(
        self,
        own: Mapping[str, Mapping[str, Any]],
        *,
        specs: Sequence[TableSpec] = (),
        servers: int = 1,
        workers: int = 1,
        mode: str = "bounded",
        handler: Callable[[ShardService], Handler] | None = None,
        journal: Path | None = None,
        **compression: Any,
    ) -> None:
        both: dict[str, Any] = {
            "consistency": ConsistencyConfig(mode=mode),
            "compression": CompressionConfig(**compression),
            "seed": 3,
        }
        self.specs = specs or [TableSpec(name=name, dim=dim, **own.get(name, {})) for name, dim in DIMS.items()]
        self.services = servers_of(self.specs, servers, num_workers=workers, **both)
        self.journals = [Journal(journal / str(s), sync=False) for s in range(servers if journal else 0)]
        for service, kept in zip(self.services, self.journals, strict=False):
            service.applier.journal = kept
            service.life.begin(0, 0)
        self.packets: list[Bytes] = []
        self.handlers = [self._recorded(handler(s) if handler else s.handle) for s in self.services]
        self.traffic = WorkerTraffic()
        transport = metered(self.handlers, self.traffic, self.specs, both["compression"])
        self.clients = [
            RowClient(transport, tables=self.specs, rank=rank, history=6, num_workers=workers, **both)
            for rank in range(workers)
        ]
        self.client = self.clients[0]

    def _recorded(self, handle: Handler) -> Handler:
        def handler(*messages: Bytes) -> Future[Bytes]:
            self.packets += messages
            return handle(*messages)

        return handler

    def sent(self, kind: Kind) -> list[Packed]:
        return [message for packet in self.packets if (message := read(packet)).kind is kind]

    def step(self, step: int, *, last: bool = False) -> list[Arrays]:
        """Pulls, and pushes random gradients; the rows that each worker pulled."""
        wanted = [ids_of_step(step, rank) for rank in range(len(self.clients))]
        requests = [client.request(ids) for client, ids in zip(self.clients, wanted, strict=True)]
        pulls = [client.pull(step, request) for client, request in zip(self.clients, requests, strict=True)]
        rows = [{name: part.copy() for name, part in pull.result().items()} for pull in pulls]
        for rank, client in enumerate(self.clients):
            grads = client.gradients(step, requests[rank])
            for name, grad_UD in grads_of_step(step, wanted[rank], rank).items():
                grads[name][:] = grad_UD
            client.push(step, requests[rank], grads, pulls=[pulls[rank]], last=last)
        return rows

    def run(self, steps: range, *, last: bool = True) -> list[list[Arrays]]:
        rows = [self.step(step, last=last and step == steps.stop - 1) for step in steps]
        for client in self.clients:
            client.fence(steps.stop)
        return rows

    def digests(self) -> dict[str, int]:
        total = dict.fromkeys((spec.name for spec in self.specs), 0)
        for service in self.services:
            for name, digest in service.tables.digests().items():
                total[name] = (total[name] + digest) % 2**128
        return total

    def weights(self, table: str) -> dict[int, np.ndarray]:
        t = list(DIMS).index(table)
        rows = [exported(service.tables[t])[:2] for service in self.services]
        return {int(id_): row for ids_N, rows_ND in rows for id_, row in zip(ids_N, rows_ND, strict=True)}


def ids_of_step(step: int, rank: int = 0) -> Arrays:
    """Worker 1 has rows of one table alone in every third step, and none in the steps after."""
    rng = np.random.default_rng(100 * step + rank)
    ids = {
        "big": np.unique(rng.zipf(1.25, 80) % 400),
        "small": np.unique(rng.integers(-(2**62), -(2**62) + 12, 8)),
        "wide": np.unique(rng.zipf(1.3, 40) % 90),
    }
    if rank == 1 and step % 3 < 2:
        return {"small": ids["small"]} if step % 3 == 0 else {}
    return ids


def grads_of_step(step: int, ids: Arrays, rank: int = 0) -> Arrays:
    rng = np.random.default_rng(7000 + 100 * step + rank)
    return {name: rng.normal(size=(ids_U.size, DIMS[name])).astype(np.float32) for name, ids_U in ids.items()}


def sums_of(table: str, steps: range) -> dict[int, np.ndarray]:
    total: dict[int, np.ndarray] = {}
    for step in steps:
        ids = ids_of_step(step)
        for id_, grad in zip(ids[table].tolist(), grads_of_step(step, ids)[table], strict=True):
            total[id_] = total.get(id_, 0) + grad.astype(np.float64)
    return total


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def many(count: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


def ones(ids: np.ndarray, table: int) -> np.ndarray:
    return np.ones((ids.size, TABLES[table].dim), dtype=np.float32)
