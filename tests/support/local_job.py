"""A whole job in this process: servers behind the in-process transport, workers as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.shard.service import ShardService
from shardkeep.ps.transport.local import LocalTransport
from shardkeep.roles.assembly import Worker, build_worker, table_specs
from shardkeep.roles.server import build_service
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.data.samples import Data


class Silent:
    """Progress that is kept, not shown."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def report(self, kind: str, record: dict[str, Any]) -> None:
        self.records.append((kind, record))

    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None:
        pass


@dataclass
class LocalJob:
    """Servers and workers of `config`, built and not yet run."""

    config: JobConfig
    data: Data
    checkpoints: Checkpoints | None = None
    resumed: Checkpoint | None = None
    elsewhere: dict[int, Checkpoints] = field(default_factory=dict)
    """Where a rank looks for the checkpoints instead."""
    services: list[ShardService] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What the workers reported."""

    def __post_init__(self) -> None:
        tables = table_specs(self.config, self.data.train.schema)
        count = max(self.config.servers, 1)
        kept = {"checkpoints": self.checkpoints, "resumed": self.resumed}
        self.services = [build_service(self.config, tables, shard=s, generation=0, **kept) for s in range(count)]
        handlers = [service.handle for service in self.services]
        ranks = ThreadCollective.group(self.config.workers) if self.config.workers > 1 else [Solo()]
        # A Tower's first act is a broadcast, so the ranks must be built side by side.
        self.workers = in_threads(
            [
                lambda rank=rank: build_worker(
                    self.config,
                    data=self.data,
                    transport=LocalTransport(handlers),
                    collective=rank,
                    generation=0,
                    device=torch.device("cpu"),
                    **kept | ({"checkpoints": self.elsewhere[rank.rank]} if rank.rank in self.elsewhere else {}),
                )
                for rank in ranks
            ]
        )

    def run(self, should_stop: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        """Trains; the summary of rank 0."""
        told = Silent()
        self.records = told.records
        return in_threads([lambda w=w: w.run(told, should_stop, lambda: 0) for w in self.workers])[0]


def in_threads(calls: list[Callable[[], Any]], timeout_s: float = 60.0) -> list[Any]:
    """Runs the calls side by side; their results in order, or the first one's exception that failed."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        if errors:
            raise errors[0]
        assert not thread.is_alive(), f"a thread still runs after {timeout_s} s"
    return results
