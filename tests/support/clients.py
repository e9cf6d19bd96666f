"""Clients of one or more servers in this process, and transports that record, count or hold their calls."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.compression.config import CompressionConfig, PullConfig, PushConfig
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.message import Kind
from tests.support.messages import Message, pack, unpack

TABLES = (
    TableSpec(name="user", dim=4),
    TableSpec(name="item", dim=3, optimizer={"name": "sgd", "lr": 1.0}, init={"name": "zeros"}),
)


def consistency(mode: str) -> ConsistencyConfig:
    return ConsistencyConfig(mode=mode)


def servers_of(
    tables: Sequence[TableSpec], count: int = 1, *, mode: str = "bounded", **settings: Any
) -> list[ShardService]:
    settings = {"consistency": consistency(mode), "num_workers": 1, "seed": 3} | settings
    return [ShardService(shard=shard, tables=tables, **settings) for shard in range(count)]


def services(
    count: int = 1,
    mode: str = "bounded",
    pull_values: str = "fp32",
    pull_scale: Any = None,
    workers: int = 1,
    push: PushConfig | None = None,
) -> list[ShardService]:
    pull = PullConfig(values=pull_values, scale=pull_scale)
    compression = CompressionConfig(pull=pull, push=push or PushConfig())
    return servers_of(TABLES, count, mode=mode, num_workers=workers, compression=compression)


def metered(handlers: Sequence[Handler], traffic: WorkerTraffic) -> MeteredTransport:
    """The transport of another generation."""
    return MeteredTransport(LocalTransport(handlers), LedgerMeter(traffic))


def connect(
    handlers: Sequence[Handler], mode: str = "bounded", traffic: WorkerTraffic | None = None, **settings: Any
) -> RowClient:
    transport = metered(handlers, WorkerTraffic() if traffic is None else traffic)
    return RowClient(transport, tables=TABLES, consistency=consistency(mode), **settings)


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

    def num_bytes(self, *kinds: Kind) -> int:
        """Bytes of the packets of these kinds and of their answers."""
        pairs = zip(self.asked, self.answered, strict=True)
        return sum(asked.size + done.result(0).size for asked, done in pairs if unpack(asked).kind in kinds)


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


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def many(count: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


def ones(ids: np.ndarray, table: int) -> np.ndarray:
    return np.ones((ids.size, TABLES[table].dim), dtype=np.float32)
