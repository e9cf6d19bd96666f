"""Builds the parts of a worker from a JobConfig. Starts nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardkeep.base.errors import ConfigError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.ps.transport.metered import Traffic
from shardkeep.ps.transport.transport import Transport
from shardkeep.roles.checkpoint_facts import check_facts, checkpoint_facts
from shardkeep.workers.best import Best
from shardkeep.workers.checkpoint.checkpointer import CheckpointPlan
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sampling import Origin
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.dense.loss import loss_of
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.figures import WorkerFigures, worker_record
from shardkeep.workers.generation import Generation
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.models.registry import MODELS, build_model, row_dim, start_at
from shardkeep.workers.report import Progress, Report
from shardkeep.workers.rewind import Rewind
from shardkeep.workers.run import TrainingJob, TrainingRun
from shardkeep.workers.step_counts import StepCounts
from shardkeep.workers.summary import ProcessCounters
from shardkeep.workers.telemetry import Telemetry
from shardkeep.workers.timing.clock import Observer, Stopwatch
from shardkeep.workers.timing.cpu_time import CpuTime
from shardkeep.workers.timing.profiling import check_profile

SPARE_STEPS = 3
"""Steps kept beyond the window of unacknowledged pushes: the running one, the next one, and one more for a rank that is
a step ahead."""
START = Origin()

_log = EventLog("roles")
_SEEDING = threading.Lock()  # torch's generator is the process's; workers may be threads of one


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The parts of a run that come from its process."""

    rank: int
    device: torch.device
    progress: Progress
    counters: ProcessCounters = field(default_factory=ProcessCounters)
    profile: Observer | None = None
    metrics: str | None = None
    """The address of the process's metrics."""
    records: Sequence[TelemetryRecords] = ()
    """Of what else is in the process."""


def table_specs(config: JobConfig, schema: Schema) -> list[TableSpec]:
    """The tables that the schema's features use, fully defined. Raises ConfigError for a table no feature uses."""
    names = schema.tables()
    config.check_tables(names)
    return [row_spec(config, name) for name in names]


def row_spec(config: JobConfig, name: str) -> TableSpec:
    """The table `name` with all values that the job's model reads from a row (`row_dim`)."""
    spec = config.table(name)
    return spec.model_copy(update={"dim": row_dim(config.model.name, spec.dim)})


def kept_steps(config: JobConfig) -> int:
    """How many steps back a worker can go when a generation is lost."""
    return config.consistency.window + SPARE_STEPS


def training_job(config: JobConfig, data: Data) -> TrainingJob:
    """The parts of the config that training reads."""
    return TrainingJob(data, config.train, config.eval, config.consistency.window, config.workers, config.seed)


def origin_of(checkpoint: Checkpoint | None, config: JobConfig, data: Data) -> Origin:
    """Where a job counts steps and samples from. Raises ConfigError if the data or the seed changed."""
    if checkpoint is None:
        return START
    if remark := check_facts(checkpoint, config, data):
        _log.info("resumed with other evaluation data", why=remark)
    return Origin(checkpoint.step, int(checkpoint.facts["samples"]))


def build_run(
    config: JobConfig,
    data: Data,
    process: WorkerProcess,
    transport: Transport,
    *,
    origin: Origin | None = START,
    checkpoints: Checkpoints | None = None,
    rewind: Rewind | None = None,
) -> TrainingRun:
    """Builds a worker at step 0.

    Args:
        transport: To as many servers as the job has.
        origin: Where steps are counted from; None = the other workers know it.
        checkpoints: Where new ones go, if the config wants any.
        rewind: Keeps the tower's last states.
    """
    client = _client(config, data.train.schema, process.rank, transport)
    embeddings = Embeddings(data.train.schema, client.tables)
    tower = build_tower(config, data, embeddings, process.device, Stopwatch(observer=process.profile))
    cpu = CpuTime(partial(_server_cpu_s, client) if process.rank == 0 else None)
    best = Best(config.train.early_stopping, config.train.plateau)
    if rewind is not None:
        best.keep_in(rewind.evaluations)
    counts = StepCounts(tower.watch) if config.counts_figures else None
    telemetry = Telemetry(tower.watch, resumed=origin != START, cpu=cpu, counts=counts)
    traffic, figures = Traffic(), None
    if counts is not None:
        figures = WorkerFigures(
            client,
            telemetry,
            counts,
            traffic.ledger,
            step=lambda: tower.step,
            generation=lambda: client.generation,
            sums=tower.sums,
            metrics=process.metrics,
        )
    return TrainingRun(
        job=training_job(config, data),
        client=client,
        embeddings=embeddings,
        tower=tower,
        traffic=traffic,
        telemetry=telemetry,
        report=Report(
            process.progress,
            client,
            telemetry,
            every_s=config.train.report_every_s,
            records=_records(config, process, figures),
        ),
        process=process.counters,
        origin=origin,
        plan=_checkpoint_plan(config, data, client, checkpoints),
        rewind=rewind,
        best=best,
        scores=_scores(config, data),
        figures=figures,
    )


def _records(config: JobConfig, process: WorkerProcess, figures: WorkerFigures | None) -> list[TelemetryRecords]:
    if figures is None or not config.telemetry_s:
        return []
    mine = TelemetryRecords(
        config.telemetry_s, figures=figures.figures, record=worker_record, report=process.progress.report
    )
    return [mine, *process.records]


def _scores(config: JobConfig, data: Data) -> BinnedScores | None:
    if config.train.order != "time":
        return None
    return BinnedScores(data.train.schema.labels, numbers=config.train.loss.of_numbers)


def check_steps(config: JobConfig, run: TrainingRun, generation: Generation, *, starts: bool) -> None:
    """Raises ConfigError when the steps to be profiled do not exist, or when the job has no step left. `starts`: this
    is a start of the job, which must have something to do."""
    total, origin = generation.trainer.total_steps, run.origin or START
    if starts and origin.step and origin.step >= total:
        raise ConfigError(f"the job is done at step {total}; raise train.epochs or train.max_steps to continue")
    check_profile(config.profile, total_steps=total)


def _client(config: JobConfig, schema: Schema, rank: int, transport: Transport) -> RowClient:
    return RowClient(
        transport,
        tables=table_specs(config, schema),
        rank=rank,
        consistency=config.consistency,
        compression=config.compression,
        timeout_s=config.liveness.step_timeout_s,
        seed=config.seed,
        history=kept_steps(config),
        num_workers=config.workers,
        measures_waits=config.counts_figures,
    )


def _server_cpu_s(client: RowClient) -> list[float]:
    """CPU seconds so far of each server that is a process of its own."""
    return [server.cpu_s for server in client.admin.cpu_time() if server.pid != os.getpid()]


def _checkpoint_plan(
    config: JobConfig, data: Data, client: RowClient, checkpoints: Checkpoints | None
) -> CheckpointPlan | None:
    if checkpoints is None or not config.checkpoint.every_steps:
        return None
    interval = CheckpointInterval(config.checkpoint.every_steps, partial(_journal_bytes, client))
    return CheckpointPlan(checkpoints, config.checkpoint, interval, partial(checkpoint_facts, config, data))


def _journal_bytes(client: RowClient) -> list[int]:
    return [journal.bytes for journal in client.admin.journal_size()]


def build_dense_model(config: JobConfig, schema: Schema, embeddings: Embeddings) -> nn.Module:
    """The model that the config names, with values of torch's generator."""
    return build_model(
        config.model,
        num_dense=schema.num_dense,
        features=embeddings.feature_dims,
        default_dim=config.table("default").dim,
        import_from=Path(config.data.root),
    )


def build_scorer(
    config: JobConfig, schema: Schema, embeddings: Embeddings, load: Callable[[nn.Module], None]
) -> Scorer:
    """The dense model on the CPU, to score with. `load`: gives it its parameters and buffers."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        model = build_dense_model(config, schema, embeddings)
    load(model)
    return Scorer(model, config.tower, torch.device("cpu"))


def build_tower(
    config: JobConfig, data: Data, embeddings: Embeddings, device: torch.device, watch: Stopwatch | None = None
) -> Tower:
    """The dense model, alone until it joins a generation. Of labels that are numbers, ours begins at their mean."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_dense_model(config, data.train.schema, embeddings)
    if config.train.loss.of_numbers and config.model.name in MODELS and len(data.label_means) == 1:
        start_at(model, data.label_means[0])
    return Tower(
        model,
        config=config.tower,
        compression=config.compression.tower,
        collective=Solo(),
        device=device,
        sync=config.consistency.mode == "sync",
        clip_norm=config.train.clip_norm,
        batch_size=config.train.batch_size,
        seed=config.seed,
        watch=watch,
        loss=loss_of(config.train.loss),
    )
