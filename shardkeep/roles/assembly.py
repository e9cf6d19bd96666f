"""Builds the parts of a worker from a JobConfig and hands them to each other. Starts nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.base.errors import CheckpointError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, Traffic
from shardkeep.ps.transport.transport import Transport
from shardkeep.roles.checkpoint_facts import check_facts, checkpoint_facts
from shardkeep.workers.checkpoint.checkpointer import Checkpointer
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.checkpoint.rank_state import load_rank_state
from shardkeep.workers.checkpoint.tower_state import load_tower
from shardkeep.workers.collectives.collective import Collective, Solo
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sampling import Origin, StepSlices
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data.weights import doubtful_weights
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.evaluate import Evaluation
from shardkeep.workers.models.registry import build_model
from shardkeep.workers.pipeline import Pipeline
from shardkeep.workers.rewind import Rewind
from shardkeep.workers.step import Step
from shardkeep.workers.summary import Counted, stopped_figures, summarize
from shardkeep.workers.telemetry import Telemetry
from shardkeep.workers.timing.cpu_time import CpuTime
from shardkeep.workers.trainer import Progress, Trainer

COMPILE_ALLOWANCE_S = 600.0
"""Seconds more that a pull or push may take while a peer compiles its tower. Sums between workers need none: nobody
compiles during one."""
SPARE_STEPS = 3
"""Steps kept beyond the window of unacknowledged pushes: the running one, the next one, and one more for a rank that is
a step ahead."""
START = Origin()

_log = EventLog("roles")
_SEEDING = threading.Lock()  # torch's generator is the process's; workers may be threads of one


def table_specs(config: JobConfig, schema: Schema) -> list[TableSpec]:
    """The tables that the schema's features use, fully defined. Raises ConfigError for a table no feature uses."""
    names = schema.tables()
    config.check_tables(names)
    return [config.table(name) for name in names]


def kept_steps(config: JobConfig) -> int:
    """How many steps back a worker can go when a generation is lost."""
    return config.consistency.window + SPARE_STEPS


@dataclass(frozen=True)
class Again:
    """How a generation follows another: at `step`, with the tower of rank `source` for the ranks `lacking`. `before`:
    this process's worker until now; None = it is new. `resumed`: the job began from a checkpoint."""

    step: int
    source: int
    lacking: tuple[int, ...]
    before: Worker | None
    resumed: bool = False


@dataclass(frozen=True)
class Worker:
    """A worker's parts, ready to run."""

    trainer: Trainer
    client: RowClient
    tower: Tower
    collective: Collective
    telemetry: Telemetry
    traffic: Traffic
    data: Data
    start: Origin
    interval: CheckpointInterval
    checkpoints: Checkpointer | None

    def run(
        self,
        progress: Progress,
        should_stop: Callable[[int], bool],
        control_bytes: Callable[[], int],
        process: Callable[[], dict[str, Any]] = dict,
        sockets: Callable[[], dict[str, Any]] = dict,
    ) -> dict[str, Any] | None:
        """Trains to the end; the job's summary on rank 0, None elsewhere. `process` and `sockets`
        are asked after the last step."""
        if not self.collective.rank and self.tower.step == self.start.step:  # not after a recovery
            for text in doubtful_weights(self.data.train):
                _log.info("doubtful weights", why=text)
                progress.report("phase", {"phase": "data", "text": f"warning: {text}"})

        counted = Counted(self.client, self.tower, self.collective, self.telemetry, self.traffic.ledger)

        def stopping(step: int) -> None:
            figures = stopped_figures(counted, control_bytes=control_bytes(), steps=step)
            if figures is not None:
                progress.report("event", {"text": f"stopped at step {step}", "figures": figures})

        steps = self.trainer.run(progress, should_stop, self.tower.step, stopping)
        progress.update(step=steps, phase="closing")
        return summarize(
            counted,
            steps=steps,
            evaluation=self.trainer.last_eval,
            control_bytes=control_bytes(),
            process=process(),
            sockets=sockets,
        )


def step_slices(config: JobConfig, *, num_samples: int, origin: Origin = START) -> StepSlices:
    """Which samples each rank draws in each step of the job."""
    return StepSlices(
        num_samples,
        batch_size=config.train.batch_size,
        world_size=config.workers,
        accumulate=config.train.accumulate,
        epochs=config.train.epochs,
        seed=config.seed,
        shuffle=config.train.shuffle,
        origin=origin,
    )


def build_worker(
    config: JobConfig,
    *,
    data: Data,
    transport: Transport,
    collective: Collective,
    generation: int,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    rewind: Rewind | None = None,
    again: Again | None = None,
) -> Worker:
    """Worker `collective.rank` of the job, at step 0, or where a checkpoint was taken, or at the step where another
    generation goes on.

    Args:
        checkpoints: Where new ones go, if the config wants any.
        resumed: A checkpoint of this job: the samples of the steps after it are counted from there.
        rewind: Where the tower's last states are.
        again: How this generation follows another.

    Raises CheckpointError."""
    before = None if again is None else again.before
    traffic = Traffic() if before is None else before.traffic
    meter = LedgerMeter(traffic)
    transport, collective = MeteredTransport(transport, meter), MeteredCollective(collective, meter)
    schema = data.train.schema
    tables = table_specs(config, schema)
    start = START if resumed is None else _origin(resumed, config, data)
    if again is not None and again.resumed:
        start = _shared_origin(collective, None if resumed is None else start, again.before)
    slices = step_slices(config, num_samples=len(data.train), origin=start)
    client = (
        before.client
        if before is not None
        else RowClient(
            transport,
            tables=tables,
            rank=collective.rank,
            generation=generation,
            consistency=config.consistency,
            compression=config.compression,
            timeout_s=config.liveness.step_timeout_s,
            seed=config.seed,
            history=kept_steps(config),
            num_workers=config.workers,
        )
    )
    embeddings = Embeddings(schema, client.tables)
    if before is not None:
        tower = before.tower
    else:  # a newcomer alone at first: the others build no tower now
        alone = Solo() if again is not None else collective
        tower = _build_tower(config, schema, embeddings, alone, device)
    if again is not None:
        _go_on(tower, collective, rewind, again)
    elif resumed is not None:
        load_tower(tower, resumed)
        load_rank_state(client, tower, resumed, rank=collective.rank, world_size=collective.world_size)
    client.regroup(transport, generation, tower.step)
    if rewind is not None:
        rewind.keep(tower)
    pipeline = Pipeline(
        dataset=data.train,
        slices=slices,
        client=client,
        embeddings=embeddings,
        rank=collective.rank,
        clock=tower.watch,
        window=config.consistency.window,
    )
    step = Step(
        client=client,
        pipeline=pipeline,
        embeddings=embeddings,
        tower=tower,
        micro_batch=config.train.batch_size,
        device=device,
        rewind=rewind,
    )
    evaluation = None
    if data.eval is not None:
        evaluation = Evaluation(
            dataset=data.eval,
            client=client,
            embeddings=embeddings,
            tower=tower,
            collective=collective,
            batch_size=config.eval.batch_size or 4 * config.train.batch_size,
            max_samples=config.eval.max_samples,
            best_auc=data.best_auc,
            device=device,
        )
    samples = slices.samples_before(tower.step)
    if before is None:
        cpu = CpuTime(partial(_server_cpu_s, client) if collective.rank == 0 else None)
        telemetry = Telemetry(tower.watch, samples=samples, resumed=resumed is not None, cpu=cpu)
    else:
        telemetry = before.telemetry
        telemetry.go_back(samples)
    if before is None:
        interval = CheckpointInterval(config.checkpoint.every_steps, partial(_journal_bytes, client))
    else:
        interval = before.interval
    writer = None
    if checkpoints is not None and config.checkpoint.every_steps:
        writer = Checkpointer(
            checkpoints,
            config.checkpoint,
            interval=interval,
            client=client,
            tower=tower,
            collective=collective,
            facts=lambda: checkpoint_facts(config, data, telemetry.samples),
        )
    trainer = Trainer(
        step=step,
        pipeline=pipeline,
        evaluation=evaluation,
        checkpoints=writer,
        client=client,
        collective=collective,
        train=config.train,
        evaluate=config.eval,
        telemetry=telemetry,
        ledger=traffic.ledger,
        compile_allowance_s=COMPILE_ALLOWANCE_S if tower.compiles else 0.0,
        again=again is not None,
        before=None if before is None else before.trainer,
    )
    return Worker(trainer, client, tower, collective, telemetry, traffic, data, start, interval, writer)


def _server_cpu_s(client: RowClient) -> list[float]:
    """CPU seconds so far of each server that is a process of its own."""
    return [server.cpu_s for server in client.admin.cpu_time() if server.pid != os.getpid()]


def _journal_bytes(client: RowClient) -> list[int]:
    return [journal.bytes for journal in client.admin.journal_size()]


def _go_on(tower: Tower, collective: Collective, rewind: Rewind | None, again: Again) -> None:
    """Brings the tower to the step where the generation begins. Every rank calls it; blocks."""
    tower.join(collective)
    assert rewind is not None  # who keeps nothing does not go on
    if collective.rank not in again.lacking:  # also at this very step: an aborted one may have left its traces
        rewind.take_back(tower, again.step)
    rewind.forget_after(again.step)  # before any rank can leave `share`
    tower.share(again.source, again.lacking)


def _origin(resumed: Checkpoint, config: JobConfig, data: Data) -> Origin:
    """Where a job goes on. Raises ConfigError when data or seed are not those of the checkpoint."""
    if remark := check_facts(resumed, config, data):
        _log.info("resumed with other evaluation data", why=remark)
    return Origin(resumed.step, int(resumed.facts["samples"]))


def _shared_origin(collective: Collective, mine: Origin | None, before: Worker | None) -> Origin:
    """The origin on which all ranks count, of the first that knows one: the checkpoints may be gone. Every rank calls
    it. Raises CheckpointError when none knows."""
    mine = mine or (None if before is None else before.start)
    told = [-1, -1] if mine is None else [mine.step, mine.samples]
    known = [row for row in collective.all_gather(torch.tensor(told), purpose="agreements").tolist() if row[0] >= 0]
    if not known:
        raise CheckpointError("the checkpoints of this job are missing, and no worker is left that knows how to count")
    return Origin(*known[0])


def build_dense_model(config: JobConfig, schema: Schema, embeddings: Embeddings) -> nn.Module:
    """The model that the config names, with values of torch's generator."""
    return build_model(
        config.model,
        num_dense=schema.num_dense,
        features=embeddings.feature_dims,
        default_dim=config.table("default").dim,
        import_from=Path(config.data.root),
    )


def _build_tower(
    config: JobConfig,
    schema: Schema,
    embeddings: Embeddings,
    collective: Collective,
    device: torch.device,
) -> Tower:
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_dense_model(config, schema, embeddings)
    return Tower(
        model,
        config=config.tower,
        compression=config.compression.tower,
        collective=collective,
        device=device,
        sync=config.consistency.mode == "sync",
        clip_norm=config.train.clip_norm,
        batch_size=config.train.batch_size,
        seed=config.seed,
    )
