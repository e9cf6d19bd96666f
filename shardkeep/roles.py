"""The mains of the roles: each starts, wires and stops one process's parts, and nothing more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardkeep.assembly import Worker, build_service, build_worker, patience_s, table_specs
from shardkeep.base.errors import ConfigError, JobStopped, MemberLost, ShardkeepError, TransportError
from shardkeep.base.kernels import compile_kernels, kernel_modules
from shardkeep.base.log import EventLog
from shardkeep.base.telemetry import peak_rss_bytes
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.control.client import ControlClient
from shardkeep.ps.control.records import Formation, JobSink
from shardkeep.ps.transport import LocalTransport, RpcTransport, connect_store
from shardkeep.workers.collective import Solo
from shardkeep.workers.data.dataset import open_data
from shardkeep.workers.process_collective import ProcessCollective
from shardkeep.workers.profiling import ServerProfile, WorkerProfile, check_profile, trace_path

_log = EventLog("roles")
FAILED_GRACE_S = 10.0
"""Seconds between a job's failure and the end of a role that is stuck in a call which cannot be interrupted."""


def run_server(address: str, *, index: int, advertise: str, folder: Path) -> int:
    """A server's life; returns 0 when the job is completed. Raises why it was not.

    `folder`: where a profile goes, below `profile/`."""
    control = ControlClient(address, role="server", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with Membership(control) as config:
        kernels_s = _load_kernels()
        formation = control.join(None)
        service = build_service(config, formation.tables, shard=index, generation=formation.generation)
        service.process = lambda: {"peak_rss_bytes": peak_rss_bytes(), "kernels_s": kernels_s}
        profile = None
        if config.profile.steps:
            profile = ServerProfile(config.profile, trace_path(folder, "server", index), service.handle)
        handle = service.handle if profile is None else profile.handle
        transport = join_group(config, formation, "server", index, advertise, handle)
        control.update(step=formation.start_step, phase="serving")
        _log.info("serving", generation=formation.generation, tables=len(formation.tables))
        try:
            control.over.wait()
        finally:
            if profile is not None:
                profile.close()
            service.close("the job is over")
            transport.close()
    state = control.state
    if state.state != "completed" and (error := state.error()) is not None:
        raise error
    _log.info("done")
    return 0


def run_worker(address: str, *, index: int, advertise: str, folder: Path) -> int:
    """A worker's life; returns the exit code when its part is done. `folder` as for a server."""
    control = ControlClient(address, role="worker", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with Membership(control) as config:
        kernels_s = _load_kernels()
        torch.set_num_threads(config.threads)
        data = open_data(config.data, seed=config.seed)
        formation = control.join(table_specs(config, data.train.schema))
        device, backend = _device(config, formation, index)
        transport = join_group(config, formation, "worker", index, advertise, None)
        collective = ProcessCollective(
            connect_store(formation.store_host, formation.store_port, timeout_s=config.liveness.form_timeout_s),
            rank=index,
            world_size=config.workers,
            generation=formation.generation,
            timeout_s=patience_s(config),
            backend=backend,
            host=advertise,
        )
        worker = build_worker(
            config,
            data=data,
            transport=transport,
            collective=collective,
            generation=formation.generation,
            device=device,
        )
        _attach(worker, _worker_profile(config, folder, index, device), config)
        _log.info("training", generation=formation.generation, steps=worker.trainer.total_steps)
        try:
            summary = worker.run(
                control,
                lambda _step: _stop(control),
                lambda: control.bytes_total,
                lambda: _process(kernels_s, device),
            )
            if summary is not None:
                control.report("summary", summary)
            collective.barrier()
        finally:
            collective.close()
            transport.close()
        _log.info("done", step=worker.trainer.total_steps)
    return 0


def run_in_process(
    config: JobConfig, sink: JobSink, should_stop: Callable[[], bool] = lambda: False, *, folder: Path
) -> dict[str, Any]:
    """The whole job in this process (`servers: 0`); the summary. Raises what training raises."""
    kernels_s = _load_kernels()
    torch.set_num_threads(config.threads)
    data = open_data(config.data, seed=config.seed)
    tables = table_specs(config, data.train.schema)
    service = build_service(config, tables, shard=0, generation=0)
    device = _device(config, None, 0)[0]
    profile = _worker_profile(config, folder, 0, device)
    worker = build_worker(
        config,
        data=data,
        transport=LocalTransport([service.handle if profile is None else profile.drawn(service.handle)]),
        collective=Solo(),
        generation=0,
        device=device,
    )
    _attach(worker, profile, config)
    summary = worker.run(
        _SinkProgress(sink), lambda _step: should_stop(), lambda: 0, lambda: _process(kernels_s, device)
    )
    assert summary is not None  # rank 0 is the only one
    return summary


class _SinkProgress:
    """Progress of a job in one process: straight into the run folder."""

    def __init__(self, sink: JobSink) -> None:
        self._sink = sink

    def report(self, kind: str, record: dict[str, Any]) -> None:
        record = {"kind": kind, "role": "worker", "index": 0} | record
        if kind == "progress":
            self._sink.progress(record)
        else:
            self._sink.event(record)

    def update(self, *, step: int, phase: str) -> None:
        pass


class Membership:
    """Registered and alive inside the `with`; on the way out says how it ended, with the job's verdict on the cause."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def __enter__(self) -> JobConfig:
        config = parse_config(self._control.register(), origin="the coordinator's config")
        self._control.start_heartbeats()
        return config

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        control = self._control
        try:
            if error is None:
                control.leave(0)
                return
            # Losing a peer is a symptom: who died comes first in the job's message when the coordinator learns it.
            symptom = isinstance(error, TransportError | MemberLost) or not isinstance(error, ShardkeepError)
            code = error.exit_code if isinstance(error, ShardkeepError) else 1
            state = control.leave(code, _one_line(error), symptom=symptom)
            if symptom and state.state in ("stopping", "stopped"):
                raise JobStopped(state.message) from None
        finally:
            control.close()


def end_when_the_job_failed(control: ControlClient, grace_s: float = FAILED_GRACE_S) -> None:
    """Starts the thread that ends this process when the job has failed and the main thread does not come to it.

    A collective with a silent peer, a compilation or a long evaluation may not see a failure for minutes."""

    def watch() -> None:
        control.failed.wait()
        time.sleep(grace_s)  # the ordinary way out, with the error in the command line's words
        _log.error("ending", reason=control.state.message)
        os._exit(control.state.exit_code or 1)

    threading.Thread(target=watch, name="job-failed", daemon=True).start()


def _stop(control: ControlClient) -> bool:
    if control.failed.is_set():
        raise control.state.error() or JobStopped("the job failed")
    return control.stop_requested.is_set()


def join_group(
    config: JobConfig,
    formation: Formation,
    role: str,
    index: int,
    host: str,
    handler: Any,
) -> RpcTransport:
    store = connect_store(formation.store_host, formation.store_port, timeout_s=config.liveness.form_timeout_s)
    return RpcTransport(
        store,
        generation=formation.generation,
        role=role,
        index=index,
        num_servers=config.servers,
        num_workers=config.workers,
        host=host,
        timeout_s=config.liveness.form_timeout_s,
        handler=handler,
    )


def _load_kernels() -> float:
    """Compiles the kernels, or loads them where that was done before; the seconds it took."""
    began = time.perf_counter()
    compile_kernels(kernel_modules())
    return time.perf_counter() - began


def _process(kernels_s: float, device: torch.device) -> dict[str, Any]:
    """What the summary says of a worker's process."""
    known: dict[str, Any] = {"peak_rss_bytes": peak_rss_bytes(), "kernels_s": kernels_s}
    return known | ({"peak_cuda_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {})


def _worker_profile(config: JobConfig, folder: Path, index: int, device: torch.device) -> WorkerProfile | None:
    if not config.profile.steps:
        return None
    return WorkerProfile(config.profile, trace_path(folder, "worker", index), cuda=device.type == "cuda")


def _attach(worker: Worker, profile: WorkerProfile | None, config: JobConfig) -> None:
    check_profile(config.profile, total_steps=worker.trainer.total_steps)
    worker.tower.watch.observer = profile


def _device(config: JobConfig, formation: Formation | None, index: int) -> tuple[torch.device, str]:
    """The worker's device and the collective's backend; None = the job is in one process.

    The workers of one host share its GPUs in order of their indices."""
    hosts = [m.host for m in formation.of_role("worker")] if formation is not None else [""] * (index + 1)
    local, here = hosts[:index].count(hosts[index]), hosts.count(hosts[index])
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.tower.device == "cuda" and not available:
        raise ConfigError("tower.device: cuda, but this machine has no CUDA device; allowed: auto or cpu")
    if not available or config.tower.device == "cpu" or (config.tower.device == "auto" and available < here):
        return torch.device("cpu"), "gloo"
    # NCCL refuses two ranks on one GPU.
    return torch.device("cuda", local % available), "nccl" if available >= here else "gloo"


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
