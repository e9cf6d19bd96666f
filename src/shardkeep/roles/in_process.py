"""The main of a job in one process (`servers: 0`): server and worker call each other directly."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer of torch loads it

from shardkeep.assembly.model import table_specs
from shardkeep.assembly.service import build_service
from shardkeep.assembly.worker import WorkerProcess, build_run, check_steps, origin_of
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.base.machine.forks import outlive_forks
from shardkeep.base.machine.memory import memory_errors
from shardkeep.config import JobConfig
from shardkeep.core_plan import worker_threads
from shardkeep.member.devices import peak_device_bytes, worker_device
from shardkeep.member.membership import loaded_kernels, process_facts
from shardkeep.member.metrics import JobMetrics, Sources, worker_samples
from shardkeep.metrics.server_samples import ServerSamples
from shardkeep.ps.control.records import JobSink, Role
from shardkeep.ps.control.telemetry import TelemetryRecords, place_of_process
from shardkeep.ps.server.figures import Handle, RequestTimes, figures_of, shard_record
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.roles.worker import SMALLER
from shardkeep.run.checkpoints import check_needs_no_rows, checkpoints_of, owned, resumed_from
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from shardkeep.trust.tokens import keep_token
from shardkeep.web.server import WebServer
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.generation import Link
from shardkeep.workers.reporting.summary import ProcessCounters
from shardkeep.workers.run import TrainingRun
from shardkeep.workers.timing.profiling import open_profile


@memory_errors(SMALLER)
def run_in_process(
    config: JobConfig,
    sink: JobSink,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    folder: Path,
    start_step: int = 0,
) -> dict[str, Any]:
    """Trains the whole job, from a checkpoint where `start_step` is above 0; the summary. Raises what training
    raises."""
    kernels_s = loaded_kernels(config, "server", "worker")
    keep_freed_memory()
    outlive_forks()
    torch.set_num_threads(worker_threads(config))
    data = open_data(config.data, seed=config.seed, items=config.items)
    if data.catalogue is not None:
        data.catalogue.write(RunReader(folder).catalogue_path)
    tables = table_specs(config, data.train.schema)
    with contextlib.ExitStack() as leaving:
        metrics = _job_metrics(config, sink, folder, start_step, leaving)
        sink = sink if metrics is None else metrics.sink
        checkpoints = owned(checkpoints_of(config, folder), config, folder, secrets.token_hex(8))
        leaving.callback(checkpoints.release)
        resumed = resumed_from(checkpoints, start_step)
        if resumed is None:
            check_needs_no_rows(tables, checkpoints.folder)
        service = build_service(config, tables, shard=0, generation=0, checkpoints=checkpoints, resumed=resumed)
        device, _ = worker_device(config, None, 0)
        profile = open_profile(config.profile, folder, "worker", 0, cuda=device.type == "cuda")
        counters = ProcessCounters(facts=lambda: process_facts(kernels_s) | peak_device_bytes(device))
        handle, records, figures = _counted(config, service, sink)
        runs: list[TrainingRun] = []
        web = leaving.enter_context(contextlib.closing(WebServer()))
        address = None if metrics is None else metrics.serve(web, _sources(config, runs, figures))
        process = WorkerProcess(0, device, _SinkProgress(sink), counters, profile, metrics=address, records=records)
        transport = LocalTransport([handle if profile is None else profile.drawn(handle)])
        origin = origin_of(resumed, config, data)
        run = build_run(config, data, process, transport, origin=origin, checkpoints=checkpoints)
        runs.append(run)
        # A snapshot that is being written ends with the service: nothing waits for it after an interrupt.
        link = Link(0, transport, Solo(), before_close=lambda: service.life.close("the job ends"))
        generation = leaving.enter_context(run.enter(link, checkpoint=resumed))
        check_steps(config, run, generation, starts=True)
        summary = generation.train(lambda _step: should_stop())
    assert summary is not None  # rank 0 is the only one
    return summary


def _counted(
    config: JobConfig, service: ShardService, sink: JobSink
) -> tuple[Handle, list[TelemetryRecords], Callable[[], dict[str, Any]]]:
    """The server's handler, and the records and figures of what it does: it has the tables of the job."""
    if not config.counts_figures:
        return service.handle, [], dict
    times = RequestTimes()
    figures, report = figures_of(lambda: service, times), _SinkProgress(sink, role="server").report
    records = TelemetryRecords.every(config.telemetry_s, figures=figures, record=shard_record, report=report)
    return times.timed(service.handle), [] if records is None else [records], figures


def _job_metrics(
    config: JobConfig, sink: JobSink, folder: Path, start_step: int, leaving: contextlib.ExitStack
) -> JobMetrics | None:
    """The job's metrics, with a token that is forgotten at the end; None = they are off."""
    if not config.web.has_metrics:
        return None
    leaving.callback(RunFolder(folder).forget_token)
    return JobMetrics(config, sink, folder, keep_token(folder), start_step=start_step)


def _sources(config: JobConfig, runs: list[TrainingRun], figures: Callable[[], dict[str, Any]]) -> Sources:
    """The metrics of the worker, once there is a run, and of the server."""
    worker = worker_samples(lambda: runs[0].meters.figures if runs else None, config)
    return {("worker", 0): worker, ("server", 0): ServerSamples(figures)}


class _SinkProgress:
    """Progress of a job in one process: straight into the run folder."""

    def __init__(self, sink: JobSink, role: Role = "worker") -> None:
        self._sink, self._role = sink, role

    def report(self, kind: str, record: dict[str, Any]) -> None:
        record = {"kind": kind, "role": self._role, "index": 0} | record
        if kind == "telemetry":
            self._sink.telemetry({"time": record["time"], **record, **place_of_process("127.0.0.1")})
        elif kind == "progress":
            self._sink.progress(record)
        else:
            self._sink.event(record)

    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None:
        pass
