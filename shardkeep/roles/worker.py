"""The main of a worker, and of a job in one process: starts, wires and stops the parts, and nothing more."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer of torch and DDP load it: here, while the other roles start

from shardkeep.base.errors import ConfigError, JobStopped, MemberLost, RemoteError, TransportError
from shardkeep.base.log import EventLog
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.base.machine.memory import memory_errors
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.records import Formation, JobSink, Span
from shardkeep.ps.rpc.group import RpcGroup
from shardkeep.ps.transport.local import LocalTransport
from shardkeep.roles.assembly import Again, Worker, build_worker, kept_steps, table_specs
from shardkeep.roles.departure import Departure
from shardkeep.roles.membership import (
    Membership,
    control_bytes,
    end_when_the_job_failed,
    join_group,
    join_store,
    kept_while_useful,
    leave_if_due,
    loaded_kernels,
    process_facts,
    replaced_folder,
    tried_while_leaving,
    watched_sockets,
)
from shardkeep.run.checkpoints import checkpoints_of, owned, resumed_from
from shardkeep.run.storage import kept_at, missed, why_unseen, with_checkpoints
from shardkeep.workers.collectives.collective import Collective, Solo
from shardkeep.workers.collectives.process_group import ProcessCollective
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.rewind import Rewind
from shardkeep.workers.timing.profiling import Profile, check_profile, open_profile

_log = EventLog("roles")
ACKNOWLEDGED_S = 2.0
"""Seconds in which servers must take the last pushes of a worker that leaves; others have to be pushed again."""


ASKS = "a worker; allowed: a smaller train.batch_size, narrower layers, fewer pool_rows or cache_rows"


def run_worker(
    coordinator: Endpoint, *, index: int, advertise: str, folder: Path, kernels_s: float, departure: Departure
) -> int:
    """A worker's life; returns the exit code when its part is done. The arguments are as for a server."""
    control = ControlClient(coordinator, role="worker", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with kept_while_useful(control, folder), Membership(control, departure) as config, memory_errors(ASKS):
        keep_freed_memory()
        torch.set_num_threads(config.threads)
        kernels_s += loaded_kernels(config, "worker")
        data = open_data(config.data, seed=config.seed)
        tables = table_specs(config, data.train.schema)
        unseen = why_unseen(control.shared, writes=index == 0)
        with contextlib.closing(_Life(config, control, data, index, advertise, folder, kernels_s, departure)) as life:
            formation: Formation | None = control.join(
                tables, data=data.fingerprint, span=life.span, kept=kept_at(life.kept), unseen=unseen
            )
            while formation is not None and (lost := life.train(formation)) is not None:
                departure.check()
                formation = control.join_again(tables, formation, data=data.fingerprint, span=life.span, why=lost)
            life.end()
    return 0


class _Life:
    """A worker process over the generations of its job."""

    def __init__(
        self,
        config: JobConfig,
        control: ControlClient,
        data: Data,
        index: int,
        advertise: str,
        folder: Path,
        kernels_s: float,
        departure: Departure,
    ) -> None:
        self._config, self._control, self._data = config, control, data
        self._departure = departure
        self._index, self._advertise, self._folder, self._kernels_s = index, advertise, folder, kernels_s
        self._checkpoints = checkpoints_of(config, folder)
        if config.checkpoint.dir is not None:
            self._own_checkpoints()
        self._looks = False  # for checkpoints
        self.kept: Path | None = None
        self._worker: Worker | None = None
        self._sockets = watched_sockets(control)
        self._rewind: Rewind | None = None
        if config.liveness.restarts:
            self.kept = replaced_folder(control, folder)
            self._rewind = Rewind(self.kept, depth=kept_steps(config))
        if control.before is not None:
            self._settle_place(control.before)

    @property
    def span(self) -> Span:
        """Where this worker could go on: at the steps whose state is kept, up to the first that it did not push."""
        kept = None if self._rewind is None else self._rewind.span()
        saved = self._checkpoints.last_step() if self._looks else -1
        if kept is None:
            return Span(saved=saved, why=missed(self._control, "its tower states") if self._control.before else "")
        last = kept[1] if self._worker is None else min(kept[1], self._worker.client.pushes.next_step)
        return Span(kept[0], last, holds=last >= kept[0], saved=saved)

    def _settle_place(self, formation: Formation) -> None:
        """Takes over where checkpoints are."""
        config = with_checkpoints(self._config, formation)
        if config != self._config:
            self._config, self._checkpoints = config, checkpoints_of(config, self._folder)
        self._own_checkpoints()
        self._looks = bool(config.checkpoint.every_steps or formation.origin)

    def _own_checkpoints(self) -> None:
        """Keeps other jobs out of the folder that this worker writes to, once it is known which one that is."""
        if self._index == 0:
            run = Path(self._control.run_dir or self._folder)
            self._checkpoints = owned(self._checkpoints, self._config, run, self._control.job)

    def close(self) -> None:
        """Leaves the folder of checkpoints to other jobs, however this worker ends."""
        self._checkpoints.release()

    def train(self, formation: Formation) -> str | None:
        """Trains in one generation, to the end of the job or of the generation: then how it was lost."""
        try:
            self._train(formation)
        except (TransportError, MemberLost) as error:
            if isinstance(error, RemoteError) or not self._config.liveness.restarts:
                raise
            _log.info("generation lost", generation=formation.generation, why=str(error))
            return str(error)
        return None

    def end(self) -> None:
        """The job is completed; nobody will go on from what is kept."""
        if self._rewind is not None:
            self._rewind.delete()
        _log.info("done", step=self._worker.trainer.total_steps if self._worker is not None else -1)

    def _train(self, formation: Formation) -> None:
        self._settle_place(formation)
        config, control = self._config, self._control
        device, backend = _device(config, formation, self._index)
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._settle)  # the last: its calls end when the transport is closed
            transport = join_group(config, formation, "worker", self._index, self._advertise, None, lost=control.lost)
            leaving.callback(transport.close)
            collective = _collective(config, formation, self._index, self._advertise, backend, control.lost)
            leaving.callback(collective.close)
            self._watch_sockets(formation, transport, collective)
            leaving.callback(self._sockets.look)
            worker = self._joined(formation, transport, collective, device)
            _log.info("training", generation=formation.generation, step=worker.tower.step)
            with self._departure.postponed(config.liveness.grace_s):
                summary = worker.run(
                    control,
                    lambda _step: self._stops(formation.generation),
                    lambda: control_bytes(control, self._sockets),
                    lambda: _process(self._kernels_s, device),
                    self._counted,
                )
            if summary is not None:
                control.report("summary", summary)
                control.flush()  # from here on the job is done, whoever dies
            collective.barrier(purpose="agreements")

    def _stops(self, generation: int) -> bool:
        """Whether the job is to stop. Asked between two steps: raises Leaving when this worker alone is to leave."""
        leave_if_due(self._control, self._departure, self._to_disk)
        return _stop(self._control, generation)

    def _to_disk(self) -> None:
        """What another worker goes on with: the pushes of the steps that are done, and the tower's states."""
        if self._worker is not None:
            self._worker.client.pushes.acknowledged_within(ACKNOWLEDGED_S)
        if self._rewind is not None:
            with tried_while_leaving():
                self._rewind.to_disk()

    def _watch_sockets(self, formation: Formation, transport: RpcGroup, collective: Collective) -> None:
        """Says which of this process's connections are whose."""
        self._sockets.belong("store", ports=[formation.store_port])
        self._sockets.belong("servers", ports=transport.server_ports)
        if isinstance(collective, ProcessCollective):
            self._sockets.belong("workers", ends=collective.connections)

    def _counted(self) -> dict[str, Any]:
        """What the kernel has counted on this worker's connections since it began, by group."""
        self._sockets.look()
        return {group: asdict(counters) for group, counters in self._sockets.totals().items()}

    def _settle(self) -> None:
        if self._worker is not None:
            self._worker.trainer.settle(self._control)

    def _joined(
        self, formation: Formation, transport: RpcGroup, collective: Collective, device: torch.device
    ) -> Worker:
        """The worker of a generation, made of the one before where that goes on."""
        again = None
        if formation.restores:
            self._worker = None
            if self._rewind is not None:
                self._rewind.clear()
        else:
            again = Again(
                formation.start_step, formation.source, formation.lacking, self._worker, resumed=formation.origin > 0
            )
        first = self._worker is None
        self._worker = build_worker(
            self._config,
            data=self._data,
            transport=transport,
            collective=collective,
            generation=formation.generation,
            device=device,
            checkpoints=self._checkpoints,
            resumed=self._resumed(formation),
            rewind=self._rewind,
            again=again,
        )
        if first:
            profile = open_profile(
                self._config.profile, self._folder, "worker", self._index, cuda=device.type == "cuda"
            )
            _attach(self._worker, profile, self._config, anew=formation.generation == 1)
        return self._worker

    def _resumed(self, formation: Formation) -> Checkpoint | None:
        """The checkpoint that steps are counted from: what a generation begins with, else any later one of the job."""
        if formation.restores or not formation.origin:
            return resumed_from(self._checkpoints, formation.start_step if formation.restores else 0)
        return self._checkpoints.latest()


def _collective(
    config: JobConfig, formation: Formation, index: int, host: str, backend: str, lost: Callable[[int], bool]
) -> Collective:
    """The ranks of this generation; the thread of a gloo group of one would wake 100 times a second for nobody."""
    if config.workers == 1:
        return Solo()
    return ProcessCollective(
        join_store(config, formation, lost),
        rank=index,
        world_size=config.workers,
        generation=formation.generation,
        timeout_s=config.liveness.step_timeout_s,
        backend=backend,
        host=host,
    )


@memory_errors(ASKS)
def run_in_process(
    config: JobConfig,
    sink: JobSink,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    folder: Path,
    start_step: int = 0,
) -> dict[str, Any]:
    """The whole job in this process (`servers: 0`), from a checkpoint where `start_step` is above 0; the summary.
    Raises what training raises."""
    from shardkeep.roles.server import build_service  # here: other workers load no server

    kernels_s = loaded_kernels(config, "server", "worker")
    keep_freed_memory()
    torch.set_num_threads(config.threads)
    data = open_data(config.data, seed=config.seed)
    tables = table_specs(config, data.train.schema)
    checkpoints = owned(checkpoints_of(config, folder), config, folder, secrets.token_hex(8))
    with contextlib.ExitStack() as leaving:
        leaving.callback(checkpoints.release)
        resumed = resumed_from(checkpoints, start_step)
        service = build_service(config, tables, shard=0, generation=0, checkpoints=checkpoints, resumed=resumed)
        device = _device(config, None, 0)[0]
        profile = open_profile(config.profile, folder, "worker", 0, cuda=device.type == "cuda")
        worker = build_worker(
            config,
            data=data,
            transport=LocalTransport([service.handle if profile is None else profile.drawn(service.handle)]),
            collective=Solo(),
            generation=0,
            device=device,
            checkpoints=checkpoints,
            resumed=resumed,
        )
        _attach(worker, profile, config, anew=True)
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

    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None:
        pass


def _stop(control: ControlClient, generation: int) -> bool:
    if control.failed.is_set():
        raise control.state.error() or JobStopped("the job failed")
    if control.lost(generation):
        raise MemberLost(control.state.message)
    return control.stop_requested.is_set()


def _process(kernels_s: float, device: torch.device) -> dict[str, Any]:
    """What the summary says of a worker's process."""
    return process_facts(kernels_s) | (
        {"peak_cuda_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    )


def _attach(worker: Worker, profile: Profile | None, config: JobConfig, *, anew: bool) -> None:
    """`anew`: this is a start of the job, which must have something to do."""
    total_steps = worker.trainer.total_steps
    if anew and worker.start.step and worker.start.step >= total_steps:
        raise ConfigError(f"the job is done at step {total_steps}; raise train.epochs or train.max_steps to go on")
    check_profile(config.profile, total_steps=total_steps)
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
