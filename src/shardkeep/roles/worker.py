"""The main of a worker: starts, wires and stops the parts, and nothing more."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import asdict
from typing import Any

import torch
import torch._dynamo  # every optimizer of torch and DDP load it: here, while the other roles start

from shardkeep.assembly.model import table_specs
from shardkeep.assembly.worker import WorkerProcess, build_run, check_steps, kept_steps, origin_of
from shardkeep.base.errors import JobStopped, MemberLost, RemoteError, TransportError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.memory import memory_errors
from shardkeep.core_plan import threads_of_role
from shardkeep.member.devices import peak_device_bytes, worker_device
from shardkeep.member.group import join_store
from shardkeep.member.member import JobMember, registered
from shardkeep.member.membership import leave_if_due, tried_while_leaving
from shardkeep.member.recovery_folder import report_unkept
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.control.records import Formation, Offer, ResumeRange
from shardkeep.ps.rpc.group import RpcGroup  # noqa: F401 - loads torch RPC while the other roles start
from shardkeep.run.checkpoints import resumed_from
from shardkeep.run.reader import RunReader
from shardkeep.run.storage import missed
from shardkeep.trust.endpoint import Endpoint
from shardkeep.workers.collectives.collective import Collective, Solo
from shardkeep.workers.collectives.process_group import ProcessCollective
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.generation import Link
from shardkeep.workers.reporting.summary import ProcessCounters
from shardkeep.workers.rewind import LastStep, Rewind
from shardkeep.workers.run import Continuation, TrainingRun
from shardkeep.workers.timing.profiling import open_profile

_log = EventLog("roles")
ACKNOWLEDGED_S = 2.0
"""Seconds in which servers must take the last pushes of a worker that leaves; others have to be pushed again."""
SMALLER = "a worker; allowed: a smaller train.batch_size, narrower layers, fewer pool_rows or cache_rows"


def run_worker(coordinator: Endpoint, **process: Any) -> int:
    """A worker's life; returns the exit code when its part is done. `process`: its arguments, see `JobMember`."""
    with registered("worker", coordinator, **process) as member, memory_errors(SMALLER):
        torch.set_num_threads(threads_of_role(member.config))
        data = open_data(member.config.data, seed=member.config.seed, items=member.config.items)
        if data.catalogue is not None and member.index == 0:
            data.catalogue.write(RunReader(member.folder).catalogue_path)
        tables = table_specs(member.config, data.train.schema)
        life = _Life(member, data)
        member.live(life, Offer(tuple(tables), data.fingerprint))
        life.end()
    return 0


class _Life:
    """A worker process over the generations of its job."""

    def __init__(self, member: JobMember, data: Data) -> None:
        self._member, self._control, self._agreed, self._data = member, member.control, member.agreed, data
        self._run: TrainingRun | None = None
        member.metrics.show_worker(lambda: None if self._run is None else self._run.meters.figures)
        self._rewind: Rewind | LastStep | None = None
        self._part = member.config.tower.parallel == "fsdp"
        if member.config.recovery.restarts and self._part:
            self._rewind = LastStep()
        elif member.config.recovery.restarts:
            self._rewind = Rewind(member.kept, depth=kept_steps(member.config), on_lost=self._rewind_lost)
        if member.control.before is not None:
            self._agreed.follow(member.control.before)

    def _rewind_lost(self, why: str) -> None:
        name = self._control.member.name
        report_unkept(self._control, "tower states", f"{name} keeps its dense states in memory alone: {why}")

    @property
    def resume_range(self) -> ResumeRange:
        """The steps at which this worker could resume: those whose state is kept, up to the first that it did not
        push."""
        kept = None if self._rewind is None else self._rewind.resume_range()
        if kept is None:
            kept_some = self._control.before and not self._part
            why = missed(self._control, "its tower states") if kept_some else ""
            return ResumeRange(saved=self._agreed.saved, why=why)
        last = kept[1] if self._run is None else min(kept[1], self._run.client.pushes.next_step)
        return ResumeRange(kept[0], last, holds=last >= kept[0], part=self._part, saved=self._agreed.saved)

    def end(self) -> None:
        """The job is completed; no process will resume from the kept states."""
        if self._rewind is not None:
            self._rewind.delete()
        _log.info("done", step=self._run.tower.step if self._run is not None else -1)

    def live(self, formation: Formation) -> str | None:
        """Trains in one generation, to the end of the job or of the generation: then how it was lost."""
        try:
            self._train(formation)
        except (TransportError, MemberLost) as error:
            if isinstance(error, RemoteError) or not self._member.config.recovery.restarts:
                raise
            _log.info("generation lost", generation=formation.generation, why=str(error))
            return str(error)
        return None

    def _train(self, formation: Formation) -> None:
        control, config = self._control, self._member.config
        device, backend = worker_device(config, formation, self._member.index)
        with contextlib.closing(self._connect(formation, backend)) as link:
            run = self._run_of(formation, link, device)
            after = checkpoint = None
            if formation.restores:
                checkpoint = self._checkpoint(formation)
            else:
                resumed = formation.origin > 0
                after = Continuation(formation.start_step, formation.source, formation.lacking, resumed)
            with run.enter(link, after, checkpoint=checkpoint) as generation:
                if run is not self._run:
                    check_steps(config, run, generation, starts=formation.generation == 1)
                self._run = run
                _log.info("training", generation=formation.generation, step=generation.start_step)
                with self._member.departure.postponed(config.liveness.grace_s):
                    summary = generation.train(lambda _step: self._stops(formation.generation))
                if summary is not None:
                    control.report("summary", summary)
                    control.flush()  # from here on the job is done, and no death matters
                link.collective.barrier(purpose="agreements")

    def _connect(self, formation: Formation, backend: str) -> Link:
        """Joins the servers and the other workers."""
        member, sockets = self._member, self._member.sockets
        with contextlib.ExitStack() as undo:
            transport = member.join_group(formation, None)
            undo.callback(transport.close)
            collective = _collective(member, formation, backend)
            undo.pop_all()
        sockets.belong("store", ports=[formation.store_port])
        sockets.belong("servers", ports=transport.server_ports)
        if isinstance(collective, ProcessCollective):
            sockets.belong("workers", ends=collective.connections)
        return Link(formation.generation, transport, collective, before_close=sockets.look)

    def _run_of(self, formation: Formation, link: Link, device: torch.device) -> TrainingRun:
        """This process's run, or another one where the job begins or goes back to a checkpoint."""
        if formation.restores:
            self._run = None
            if self._rewind is not None:
                self._rewind.clear()
            if self._part:
                gc.collect()  # a model in shards is part of a reference cycle
        if self._run is not None:
            return self._run
        config, checkpoint = self._member.config, self._checkpoint(formation)
        profile = open_profile(
            config.profile, self._member.folder, "worker", self._member.index, cuda=device.type == "cuda"
        )
        unknown = checkpoint is None and formation.origin > 0
        return build_run(
            config,
            self._data,
            WorkerProcess(
                self._member.index, device, self._control, self._counters(device), profile, self._member.metrics.address
            ),
            link.transport,
            origin=None if unknown else origin_of(checkpoint, config, self._data),
            checkpoints=self._agreed.checkpoints,
            rewind=self._rewind,
        )

    def _checkpoint(self, formation: Formation) -> Checkpoint | None:
        """The checkpoint that steps are counted from: what a generation begins with, else any later one of the job."""
        if formation.restores or not formation.origin:
            return resumed_from(self._agreed.checkpoints, formation.start_step if formation.restores else 0)
        return self._agreed.checkpoints.latest()

    def _counters(self, device: torch.device) -> ProcessCounters:
        return ProcessCounters(
            control_bytes=lambda: self._member.control_bytes,
            facts=lambda: self._member.facts() | peak_device_bytes(device),
            sockets=self._counted,
        )

    def _counted(self) -> dict[str, Any]:
        """What the kernel has counted on this worker's connections since it began, by group."""
        self._member.sockets.look()
        return {group: asdict(counters) for group, counters in self._member.sockets.totals().items()}

    def _stops(self, generation: int) -> bool:
        """Whether the job is to stop. Called between two steps: raises Leaving when this worker alone is to leave."""
        control = self._control
        leave_if_due(control, self._member.departure, self._to_disk)
        if control.failed.is_set():
            raise control.state.error() or JobStopped("the job failed")
        if control.lost(generation):
            raise MemberLost(control.state.message)
        return control.stop_requested.is_set()

    def _to_disk(self) -> None:
        """What another worker resumes with: the pushes of the steps that are done, and the tower's states."""
        if self._run is not None:
            self._run.client.pushes.acknowledged_within(ACKNOWLEDGED_S)
        if self._rewind is not None:
            with tried_while_leaving():
                self._rewind.to_disk()


def _collective(member: JobMember, formation: Formation, backend: str) -> Collective:
    """The ranks of this generation; the thread of a gloo group of one would wake 100 times a second for nobody."""
    config, control = member.config, member.control
    if config.workers == 1:
        return Solo()
    collective = ProcessCollective(
        join_store(config, formation, control.lost),
        rank=member.index,
        world_size=config.workers,
        generation=formation.generation,
        timeout_s=config.liveness.step_timeout_s,
        backend=backend,
        host=control.member.host,
    )
    if collective.backend != backend:
        _log.info(
            "dense gradients go over gloo: not every worker has a GPU of its own", generation=formation.generation
        )
    return collective
