"""A job in this process whose workers push random gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport

IDS = np.arange(0, 60, 3, dtype=np.int64)
DIM = 6


def gradient(step: int, rank: int, rows: int) -> np.ndarray:
    """What a rank pushes at a step."""
    return np.random.default_rng(100 * step + rank).normal(size=(rows, DIM)).astype(np.float32)


class Job:
    """A job in this process: services of all servers, a client of each worker."""

    def __init__(
        self,
        mode: str,
        optimizer: dict[str, Any],
        *,
        workers: int = 1,
        servers: int = 1,
        compression: CompressionConfig | None = None,
        init: Any = None,
        journals: Path | None = None,
        **table: Any,
    ) -> None:
        init = init or {"name": "normal", "std": 0.5}
        tables = (TableSpec(name="t", dim=DIM, optimizer=optimizer, init=init, **table),)
        self.consistency = consistency = ConsistencyConfig(mode=mode)
        compression = compression or CompressionConfig()
        self._folder, self.replayed_pushes = journals, 0
        """Found in the journal that was replayed last."""
        self.journals = [] if journals is None else [Journal(journals / str(s), sync=False) for s in range(servers)]
        self.services = [
            ShardService(
                shard=s,
                tables=tables,
                consistency=consistency,
                num_workers=workers,
                seed=1,
                compression=compression,
                journal=self.journals[s] if self.journals else None,
            )
            for s in range(servers)
        ]
        for service in self.services if self.journals else []:
            service.life.begin(1, 0)
        self.clients = [
            RowClient(
                LocalTransport([service.handle for service in self.services]),
                tables=tables,
                rank=rank,
                generation=1 if self.journals else 0,
                consistency=consistency,
                compression=compression,
                seed=1,
                num_workers=workers,
            )
            for rank in range(workers)
        ]

    def step(self, step: int, *, factor: float = 1.0, ids: dict[int, np.ndarray] | None = None, size: float = 1.0):
        """Every rank pulls, pushes gradients of its own; in sync the next pulls apply them."""
        requests = [client.request({"t": (ids or {}).get(rank, IDS)}) for rank, client in enumerate(self.clients)]
        pulls = [client.pull(step, request) for client, request in zip(self.clients, requests, strict=True)]
        for pull in pulls:
            pull.result()
        for rank, (client, request) in enumerate(zip(self.clients, requests, strict=True)):
            grads = client.gradients(step, request)
            grads["t"][:] = size * gradient(step, rank, len(grads["t"]))
            client.push(step, request, grads, lr_factor=factor)
            client.wait_acknowledged()

    def train(self, factors: list[float]) -> Job:
        for step, factor in enumerate(factors):
            self.step(step, factor=factor)
        return self.fenced(len(factors))

    def fenced(self, step: int) -> Job:
        """All pushes before `step` are applied afterwards."""
        for client in self.clients:
            client.wait_acknowledged()
        pulls = [client.pull(step, client.request({})) for client in self.clients]
        for pull in pulls:
            pull.result()
        return self

    def rows(self, ids: np.ndarray = IDS) -> np.ndarray:
        return self.clients[0].read(self.clients[0].request({"t": ids})).result()["t"].copy()

    def replayed(self, server: int = 0) -> ShardService:
        """A server that replays what a killed one had in its journal."""
        assert self._folder is not None
        self.journals[server].close()
        journal = Journal(self._folder / str(server), sync=False)
        tables = list(self.clients[0].tables.values())
        service = ShardService(
            shard=server, tables=tables, consistency=self.consistency, num_workers=len(self.clients), seed=1,
            journal=journal,
        )  # fmt: skip
        self.replayed_pushes = service.life.replay(journal.replay())
        service.applier.advance()
        return service

    @property
    def digests(self) -> list[dict[str, int]]:
        return [service.tables.digests() for service in self.services]

    @property
    def total(self) -> int:
        """The digest of the table on all servers together."""
        return sum(found["t"] for found in self.digests) % (1 << 128)
