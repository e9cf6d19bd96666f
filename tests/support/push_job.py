"""A job in this process whose workers push random gradients of one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from tests.support import clients

IDS = np.arange(0, 60, 3, dtype=np.int64)
DIM = 6


def gradient(step: int, rank: int, rows: int) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).normal(size=(rows, DIM)).astype(np.float32)


class Job(clients.Job):
    """A job of the table `t`. `compression`: settings of it; `journals`: a folder for those of the servers."""

    def __init__(
        self,
        mode: str,
        optimizer: Mapping[str, Any],
        *,
        workers: int = 1,
        servers: int = 1,
        compression: Mapping[str, Any] | None = None,
        init: Any = None,
        journals: Path | None = None,
        **table: Any,
    ) -> None:
        init = init or {"name": "normal", "std": 0.5}
        specs = [TableSpec(name="t", dim=DIM, optimizer=optimizer, init=init, **table)]  # type: ignore[arg-type]
        settings = {"workers": workers, "servers": servers, "mode": mode, "journal": journals, **(compression or {})}
        super().__init__({}, specs=specs, **settings)
        self._consistency, self._folder = ConsistencyConfig(mode=mode), journals

    def push(
        self, step: int, *, factor: float = 1.0, ids: dict[int, np.ndarray] | None = None, size: float = 1.0
    ) -> None:
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
            self.push(step, factor=factor)
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
        return self.client.read(self.client.request({"t": ids})).result()["t"].copy()

    def replayed(self) -> ShardService:
        """A server that replays what the first one, killed, had in its journal."""
        assert self._folder is not None
        self.journals[0].close()
        journal = Journal(self._folder / "0", sync=False)
        given = {"tables": self.specs, "consistency": self._consistency, "num_workers": len(self.clients), "seed": 3}
        service = ShardService(shard=0, journal=journal, **given)  # type: ignore[arg-type]
        assert service.life.replay(journal.replay())
        service.applier.advance()
        return service
