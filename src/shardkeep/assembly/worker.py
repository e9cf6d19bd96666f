"""Builds the parts of a worker from a JobConfig. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shardkeep.assembly.checkpoint_facts import check_facts, checkpoint_facts
from shardkeep.assembly.item_side import build_sides
from shardkeep.assembly.model import build_tower, inherited, table_specs
from shardkeep.base.errors import ConfigError
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.admin import GetCpuTime, GetJournalSize, JournalSize, ServerCpuTime
from shardkeep.workers.checkpoint.checkpointer import CheckpointPlan
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sampling import StepOrigin
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.generation import Generation
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.dense_figures import DenseFigures
from shardkeep.workers.reporting.figures import WorkerFigures, worker_record
from shardkeep.workers.reporting.report import ProgressSink, Report
from shardkeep.workers.reporting.summary import Meters, ProcessCounters
from shardkeep.workers.rewind import LastStep, Rewind
from shardkeep.workers.run import TrainingJob, TrainingRun
from shardkeep.workers.timing.clock import Observer, Stopwatch
from shardkeep.workers.timing.cpu_time import CpuMeter
from shardkeep.workers.timing.profiling import check_profile

SPARE_STEPS = 3
"""Steps kept beyond the window of unacknowledged pushes: the running one, the next one, and one more for a rank that is
a step ahead."""
START = StepOrigin()

_log = EventLog("roles")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The parts of a run that come from its process."""

    rank: int
    device: torch.device
    progress: ProgressSink
    counters: ProcessCounters = field(default_factory=ProcessCounters)
    profile: Observer | None = None
    metrics: str | None = None
    """The address of the process's metrics."""
    records: Sequence[TelemetryRecords] = ()
    """Of what else is in the process."""


def kept_steps(config: JobConfig) -> int:
    """How many steps back a worker can go when a generation is lost."""
    return config.consistency.window + SPARE_STEPS


def training_job(config: JobConfig, data: Data) -> TrainingJob:
    """The parts of the config that training reads."""
    sizes, blocks = (config.consistency.window, config.workers, config.seed), config.data.shuffle == "blocks"
    origin = partial(inherited, config, data.train.schema)
    return TrainingJob(data, config.train, config.eval, *sizes, blocks, config.schedules, origin)


def origin_of(checkpoint: Checkpoint | None, config: JobConfig, data: Data) -> StepOrigin:
    """Where a job counts steps and samples from. Raises ConfigError if the data or the seed changed."""
    if checkpoint is None:
        return START
    if remark := check_facts(checkpoint, config, data):
        _log.info("resumed with other evaluation data", why=remark)
    return StepOrigin(checkpoint.step, int(checkpoint.facts["samples"]))


def build_run(
    config: JobConfig,
    data: Data,
    process: WorkerProcess,
    transport: Transport,
    *,
    origin: StepOrigin | None = START,
    checkpoints: Checkpoints | None = None,
    rewind: Rewind | LastStep | None = None,
) -> TrainingRun:
    """Builds a worker at step 0.

    Args:
        transport: To as many servers as the job has.
        origin: Where steps are counted from; None = the other workers know it.
        checkpoints: Where new ones go, if the config wants any.
        rewind: Keeps the tower's last states.
    """
    client = _client(config, data.train.schema, process.rank, transport)
    embeddings, item_side = build_sides(config, data, client.tables)
    tower = build_tower(config, data, embeddings, process.device, Stopwatch(observer=process.profile))
    cpu = CpuMeter(partial(_server_cpu_s, client) if process.rank == 0 else None)
    best = EvaluationHistory(config.train.early_stopping, config.train.plateau)
    if rewind is not None:
        best.keep_in(rewind.evaluations)
    counters = StepCounters(tower.watch, resumed=origin != START, cpu=cpu)
    traffic, figures = WorkerTraffic(), None
    if config.counts_figures:
        figures = WorkerFigures(
            client,
            counters,
            traffic.ledger,
            step=lambda: tower.step,
            generation=lambda: client.generation,
            sums=tower.sums,
            metrics=process.metrics,
            dense=DenseFigures(tower.compilation, counters),
        )
    return TrainingRun(
        job=training_job(config, data),
        client=client,
        embeddings=embeddings,
        tower=tower,
        meters=Meters(counters, traffic, process.counters, figures),
        report=Report(
            process.progress,
            client,
            counters,
            every_s=config.train.report_every_s,
            records=_records(config, process, figures),
        ),
        origin=origin,
        plan=_checkpoint_plan(config, data, client, checkpoints),
        rewind=rewind,
        best=best,
        scores=_scores(config, data),
        item_side=item_side,
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
    schema = data.train.schema
    return BinnedScores(schema.labels, numbers=config.train.loss.of_numbers, tasks=schema.tasks)


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
        seed=config.seed,
        timeout_s=config.liveness.step_timeout_s,
        history=kept_steps(config),
        num_workers=config.workers,
        measures_waits=config.counts_figures,
        import_from=Path(config.data.root),
    )


def _server_cpu_s(client: RowClient) -> list[float]:
    """CPU seconds so far of each server that is a process of its own."""
    return [server.cpu_s for server in client.calls.ask(GetCpuTime(), ServerCpuTime) if server.pid != os.getpid()]


def _checkpoint_plan(
    config: JobConfig, data: Data, client: RowClient, checkpoints: Checkpoints | None
) -> CheckpointPlan | None:
    if checkpoints is None or not config.checkpoint.on:
        return None
    interval = CheckpointInterval(config.checkpoint.period, partial(_journal_bytes, client))
    return CheckpointPlan(checkpoints, config.checkpoint, interval, partial(checkpoint_facts, config, data))


def _journal_bytes(client: RowClient) -> list[int]:
    return [journal.bytes for journal in client.calls.ask(GetJournalSize(), JournalSize)]
