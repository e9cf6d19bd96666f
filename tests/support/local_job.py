"""A whole job in this process: servers behind the in-process transport, workers as threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from shardkeep.assembly.model import table_specs
from shardkeep.assembly.service import build_service
from shardkeep.assembly.worker import START, WorkerProcess, build_run, origin_of
from shardkeep.base.errors import MemberLost
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport, Transport
from shardkeep.workers.checkpoint.checkpointer import Checkpointer
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sampling import StepOrigin
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.generation import Generation, Link
from shardkeep.workers.rewind import Rewind
from shardkeep.workers.run import Continuation, TrainingRun
from shardkeep.workers.trainer import Trainer


class Silent:
    """Progress that is kept, not shown."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def report(self, kind: str, record: dict[str, Any]) -> None:
        self.records.append((kind, record))

    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None:
        pass


@dataclass(frozen=True)
class Worker:
    """A worker in its only generation."""

    run: TrainingRun
    generation: Generation

    @property
    def client(self) -> RowClient:
        return self.run.client

    @property
    def tower(self) -> Tower:
        return self.run.tower

    @property
    def trainer(self) -> Trainer:
        return self.generation.trainer

    @property
    def checkpoints(self) -> Checkpointer | None:
        return self.generation.trainer.checkpoints


def in_process(services: list[ShardService]) -> Transport:
    return LocalTransport([service.handle for service in services])


@dataclass
class LocalJob:
    """Servers and workers of `config`, built and not yet run."""

    config: JobConfig
    data: Data
    checkpoints: Checkpoints | None = None
    resumed: Checkpoint | None = None
    elsewhere: dict[int, Checkpoints] = field(default_factory=dict)
    """Where a rank looks for the checkpoints instead."""
    rewinds: Path | None = None
    """Where the workers keep the tower's last states; None = they keep none."""
    journals: Path | None = None
    """Where the servers keep their journals; None = they keep none."""
    connect: Callable[[list[ShardService]], Transport] = in_process
    """Makes a worker's transport."""
    services: list[ShardService] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    """Of the last generation that followed another."""
    progress: Silent = field(default_factory=Silent)

    def __post_init__(self) -> None:
        self.services = [self._service(shard, self.resumed) for shard in range(max(self.config.servers, 1))]
        for service in self.services if self.journals is not None else ():
            service.life.begin(0, 0 if self.resumed is None else self.resumed.step)
        origin = origin_of(self.resumed, self.config, self.data)
        # A generation begins with a broadcast, so the ranks must enter side by side.
        self.workers = in_threads([lambda link=link: self._worker(link, origin) for link in self._links(0)])

    def _service(self, shard: int, resumed: Checkpoint | None) -> ShardService:
        journal = None if self.journals is None else Journal(self.journals / str(shard), sync=False)
        tables = table_specs(self.config, self.data.train.schema)
        kept: dict[str, Any] = {"checkpoints": self.checkpoints, "resumed": resumed, "journal": journal}
        return build_service(self.config, tables, shard=shard, generation=0, **kept)

    def replace_server(self, shard: int) -> None:
        """Makes another server of what one that died has kept: the last checkpoint, and its journal after that."""
        before = self.services[shard]
        before.life.suspend("it died")
        assert before.applier.journal is not None and self.checkpoints is not None
        before.applier.journal.close()
        service = self.services[shard] = self._service(shard, self.checkpoints.latest())
        assert service.applier.journal is not None
        service.life.replay(service.applier.journal.replay())

    def _links(self, number: int) -> list[Link]:
        ranks = ThreadCollective.group(self.config.workers) if self.config.workers > 1 else [Solo()]
        return [Link(number, self.connect(self.services), rank) for rank in ranks]

    def _worker(self, link: Link, origin: StepOrigin) -> Worker:
        run = self._run(link, origin)
        return Worker(run, run.enter(link, checkpoint=self.resumed))

    def _run(self, link: Link, origin: StepOrigin | None) -> TrainingRun:
        rank = link.collective.rank
        folder = None if self.rewinds is None else self.rewinds / f"{link.number}-{rank}"
        return build_run(
            self.config,
            self.data,
            WorkerProcess(rank, torch.device("cpu"), self.progress),
            link.transport,
            origin=origin,
            checkpoints=self.elsewhere.get(rank, self.checkpoints),
            rewind=None if folder is None else Rewind(folder, depth=4),
        )

    def lose(self, before: int) -> None:
        """Trains until all workers lose their generation, before the step `before`."""

        def check(step: int) -> bool:
            if step == before:
                raise MemberLost("a member died")
            return False

        def train(worker: Worker) -> None:
            with contextlib.suppress(MemberLost), worker.generation:
                worker.generation.train(check)

        in_threads([lambda w=w: train(w) for w in self.workers])

    def continue_at(self, step: int, *, source: int = 0, replaced: tuple[int, ...] = ()) -> None:
        """Forms another generation, in which the ranks `replaced` are new processes that know nothing."""
        number, resumed = self.workers[0].generation.link.number + 1, self.resumed is not None
        for service in self.services:
            service.life.suspend("a generation was lost")
            service.life.begin(number, step)
        after = Continuation(step, source, replaced, resumed)

        def enter(link: Link) -> Worker:
            rank = link.collective.rank
            newcomer = rank in replaced
            run = self._run(link, None if resumed else START) if newcomer else self.workers[rank].run
            return Worker(run, run.enter(link, after))

        self.links = self._links(number)
        self.workers = in_threads([lambda link=link: enter(link) for link in self.links])

    @property
    def records(self) -> list[tuple[str, dict[str, Any]]]:
        return self.progress.records

    def run(self, should_stop: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        return in_threads([lambda w=w: w.generation.train(should_stop) for w in self.workers])[0]


def in_threads(calls: list[Callable[[], Any]], timeout_s: float = 60.0) -> list[Any]:
    """Runs the calls side by side; their results in order, or the exception of the first one that failed. The others
    are left alone then: they may wait 30 s for the one that failed."""
    done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run(i: int) -> None:
        try:
            done.put((i, calls[i](), None))
        except BaseException as error:
            done.put((i, None, error))

    for i in range(len(calls)):
        threading.Thread(target=run, args=(i,), daemon=True).start()
    results: list[Any] = [None] * len(calls)
    for _ in calls:
        try:
            i, results[i], error = done.get(timeout=timeout_s)
        except Empty:
            raise AssertionError(f"a thread still runs after {timeout_s} s") from None
        if error is not None:
            raise error
    return results
