"""The main of a server: starts, wires and stops the parts of one process. Loads nothing that only workers need."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ConfigError, DeadlineExceeded, TransportError
from shardkeep.base.log import EventLog
from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.compression.values.codec import value_codec
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.config import TableSpec, check_policies
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.records import ANY_STEP, Formation, ResumeRange
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.ps.placement import buckets_of
from shardkeep.ps.rpc.group import RpcGroup
from shardkeep.ps.shard.figures import RequestTimes, ShardFigures, shard_record
from shardkeep.ps.shard.journal.journal import GIVEN_UP, Journal
from shardkeep.ps.shard.service import ShardService
from shardkeep.ps.shard.snapshot.files import load_snapshots
from shardkeep.ps.shard.snapshot.index import earlier_steps
from shardkeep.roles.agreed_checkpoints import AgreedCheckpoints
from shardkeep.roles.departure import Departure
from shardkeep.roles.group import join_group
from shardkeep.roles.membership import (
    Membership,
    control_bytes,
    end_when_the_job_failed,
    leave_if_due,
    loaded_kernels,
    process_facts,
    tried_while_leaving,
    watched_sockets,
)
from shardkeep.roles.memory_watch import MemoryWatch
from shardkeep.roles.metrics import MemberMetrics
from shardkeep.roles.recovery_folder import kept_while_useful, replaced_folder
from shardkeep.run.checkpoints import check_needs_no_rows, resumed_from
from shardkeep.run.storage import kept_at, missed, why_unseen

if TYPE_CHECKING:
    from shardkeep.workers.timing.profiling import Profile

_log = EventLog("roles")


def run_server(
    coordinator: Endpoint, *, index: int, advertise: str, folder: Path, kernels_s: float, departure: Departure
) -> int:
    """A server's life; returns 0 when the job is completed. Raises why it was not.

    Args:
        folder: The run folder: a profile goes there, what is kept for recovery if the server that this one replaces
            kept it nowhere else, and checkpoints where the config names no other place.
        kernels_s: Seconds it took to compile kernels, for the summary.
        departure: How it leaves when a signal asks it to.
    """
    control = ControlClient(coordinator, role="server", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with kept_while_useful(control, folder), Membership(control, departure) as config:
        keep_freed_memory()
        kernels_s += loaded_kernels(config, "server")
        with contextlib.closing(_Life(config, coordinator, control, folder, departure, kernels_s)) as life:
            unseen = why_unseen(control.shared, writes=True)
            formation: Formation | None = control.join(
                None, resume_range=life.resume_range, kept=kept_at(life.kept), unseen=unseen
            )
            while formation is not None and (lost := life.serve(formation)) is not None:
                departure.check()
                formation = control.join_again(None, formation, resume_range=life.resume_range, why=lost)
    state = control.state
    if state.state != "completed" and (error := state.error()) is not None:
        raise error
    _log.info("done")
    return 0


@dataclass(frozen=True)
class _Loss:
    """The updates that a replacement lacks."""

    since: int = 0
    """The step of the checkpoint that it has."""
    why: str = ""
    """Why it lacks the later ones; empty = it lacks none."""
    has_checkpoint: bool = False

    @property
    def follows(self) -> bool:
        """Whether it can follow the others from its checkpoint, with the updates since then lost."""
        return bool(self.why) and self.has_checkpoint


class _Life:
    """A server process over the generations of its job."""

    def __init__(
        self,
        config: JobConfig,
        coordinator: Endpoint,
        control: ControlClient,
        folder: Path,
        departure: Departure,
        kernels_s: float,
    ) -> None:
        self._control, self._departure, self._kernels_s = control, departure, kernels_s
        self._index = control.member.index
        self._agreed = AgreedCheckpoints(config, control, folder)
        self._sockets = watched_sockets(control)
        self._service: ShardService | None = None
        self._times = RequestTimes() if config.counts_figures else None
        self._metrics = MemberMetrics(config, coordinator, control.member)
        self._telemetry = self._records(config)
        self._loss = _Loss()
        self.kept: Path | None = None
        """Where the journal is; None = nowhere."""
        self._journal: Journal | None = None
        if config.liveness.restarts and config.journal != "off":
            self.kept = replaced_folder(control, folder)
            self._journal = Journal(
                self.kept / "journal",
                sync=config.journal == "fsync",
                limit_bytes=config.recovery.max_journal_bytes,
                on_given_up=self._journal_given_up,
            )
        self._profile = _open_profile(config, folder, self._index)
        if control.before is not None:
            self._agreed.follow(control.before)
            self._revive(control.before)

    @property
    def resume_range(self) -> ResumeRange:
        """The steps at which this server could resume. If it lost the updates since a checkpoint, it follows the
        others, except in `sync`. If it lost all updates, the others start again."""
        if self._service is None:
            return ResumeRange()
        first, last = self._service.life.resume_range
        lost_from = None
        follows = self._loss.follows and bool(self._agreed.config.checkpoint.every_steps)  # a loop starts again
        if follows and not self._service.applier.gate.stages:
            first, last, lost_from = 0, ANY_STEP, self._loss.since
        return ResumeRange(first, last, holds=True, saved=self._agreed.saved, lost_from=lost_from, why=self._loss.why)

    def serve(self, formation: Formation) -> str | None:
        """Serves one generation, to the end of the job or of the generation: then how it was lost."""
        self._agreed.follow(formation)
        service = self._service_for(formation)
        service.life.begin(formation.generation, formation.start_step)
        try:
            transport = self._join(formation)
        except TransportError as error:
            if not self._agreed.config.liveness.restarts:
                raise
            service.life.suspend(str(error))
            return str(error)
        self._control.update(step=formation.start_step, phase="serving")
        _log.info("serving", generation=formation.generation, tables=len(formation.tables))
        why = f"server {self._index} left"
        try:
            with self._departure.postponed(self._agreed.config.liveness.grace_s):
                self._wait(formation.generation)
            why = self._control.state.message or "the job is over"
            if self._telemetry is not None and self._control.state.over:
                self._telemetry.send()
        finally:
            service.life.suspend(why)
            transport.close()
            self._to_disk()
        return None if self._control.state.over else self._control.state.message

    def _service_for(self, formation: Formation) -> ShardService:
        """This process's service, or another one where the job begins or goes back to a checkpoint."""
        if self._service is None or formation.restores:
            self._service = None  # before another one takes as much memory
            if self._journal is not None:
                self._journal.clear()
                self._journal.build_on(formation.start_step)
            self._service = self._build(formation.tables, resumed_from(self._agreed.checkpoints, formation.start_step))
        self._loss = _Loss()
        return self._service

    def _join(self, formation: Formation) -> RpcGroup:
        control, handle = self._control, self._handle
        if self._times is not None:
            handle = self._times.timed(handle)
        if self._profile is not None:
            handle = self._profile.led(handle)
        host = control.member.host
        return join_group(self._agreed.config, formation, "server", self._index, host, handle, lost=control.lost)

    def _wait(self, generation: int) -> None:
        """Until the job is over or the generation is lost. Raises Leaving when this server alone is to leave."""
        departure, control, memory = self._departure, self._control, MemoryWatch(self._index, self._control.report)
        telemetry = self._telemetry

        def is_to_leave() -> bool:
            memory.look()  # each heartbeat comes by here
            if telemetry is not None:
                telemetry.look()
            return departure.asked

        while not control.wait_lost_or_over(generation, unless=is_to_leave):
            control.stop_requested.wait(departure.works_on_s)
            leave_if_due(control, departure, self._to_disk)
            if control.stop_requested.is_set():  # it needs its servers until its end
                control.wait_lost_or_over(generation)
                return

    def _records(self, config: JobConfig) -> TelemetryRecords | None:
        if self._times is None:
            return None
        figures = ShardFigures(lambda: self._service, self._times, metrics=self._metrics.address).figures
        self._metrics.show_server(figures)
        return TelemetryRecords.every(
            config.telemetry_s, figures=figures, record=shard_record, report=self._control.report
        )

    def _to_disk(self) -> None:
        """Of a server that leaves: the journal."""
        if self._departure.asked and self._journal is not None:
            with tried_while_leaving():
                self._journal.to_disk()

    def close(self) -> None:
        """Ends what serves; a completed job needs nothing that was kept."""
        self._metrics.close()
        if self._profile is not None:
            self._profile.close()
        if self._journal is not None:
            self._journal.close()
        if self._control.state.state == "completed" and self.kept is not None:
            shutil.rmtree(self.kept, ignore_errors=True)

    def _revive(self, before: Formation) -> None:
        """Makes this server what the one before was when it died: the last checkpoint, and the journal after it."""
        resumed = self._agreed.checkpoints.latest() if self._agreed.looks else None
        since = 0 if resumed is None else resumed.step
        self._loss = loss = _Loss(since, self._missing(since), has_checkpoint=resumed is not None)
        service = self._service = self._build(before.tables, resumed)
        if loss.why and self._journal is not None:
            self._journal.clear()
            self._journal.build_on(since)
        pushes = service.life.replay([] if self._journal is None else self._journal.replay())
        _log.info("revived", checkpoint=since, pushes=pushes, step=service.life.resume_range[1])
        if loss.why:
            text = f"server {self._index} lost its updates since step {since}: {loss.why}"
            self._control.report("event", {"text": text, "lost_from": since})
            with contextlib.suppress(DeadlineExceeded):  # the line of the recovery has it, if it comes in time
                self._control.flush()

    def _missing(self, step: int) -> str:
        """What the checkpoint of `step` lacks to make this server what the one before was; "" = nothing."""
        if self._journal is None:
            return f"server {self._index} keeps no journal (journal: off)"
        if not self._journal.size_bytes:
            return missed(self._control, "its journal")
        if self._journal.base <= step:
            return ""
        if self._journal.base == GIVEN_UP:
            return f"the journal of server {self._index} was given up (recovery.max_journal_bytes)"
        return (
            f"the journal of server {self._index} begins after the checkpoint of step {self._journal.base}, which is "
            f"missing in {self._agreed.checkpoints.folder}"
        )

    def _journal_given_up(self, size: int) -> None:
        text = f"the journal of server {self._index} has {size / 1e9:.1f} GB and is given up: it cannot be replaced now"
        _log.warning(text)
        self._control.report("event", {"text": text})

    def _build(self, tables: Sequence[TableSpec], resumed: Checkpoint | None) -> ShardService:
        if resumed is None:
            check_needs_no_rows(tables, self._agreed.checkpoints.folder)
        return build_service(
            self._agreed.config,
            tables,
            shard=self._index,
            generation=0,
            checkpoints=self._agreed.checkpoints,
            resumed=resumed,
            journal=self._journal,
            process=self._facts,
        )

    def _facts(self) -> dict[str, Any]:
        """What the summary says about this process."""
        return process_facts(self._kernels_s) | {"control_bytes": control_bytes(self._control, self._sockets)}

    def _handle(self, *messages: Bytes) -> Future[Bytes]:
        assert self._service is not None
        return self._service.handle(*messages)


def _open_profile(config: JobConfig, folder: Path, index: int) -> Profile | None:
    if not config.profile.steps:
        return None
    from shardkeep.workers.timing.profiling import open_profile  # a server needs nothing else of this room

    return open_profile(config.profile, folder, "server", index)


def build_service(
    config: JobConfig,
    tables: Sequence[TableSpec],
    *,
    shard: int,
    generation: int,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    journal: Journal | None = None,
    process: Callable[[], dict[str, Any]] = dict,
) -> ShardService:
    """Server `shard` of the job, empty, or with its rows of a checkpoint. Raises CheckpointError and ConfigError."""
    try:
        check_policies(tables, config.consistency)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    push = config.compression.push
    value_codec(push.values, push.scale)  # loads what decodes it now, not while the first push waits
    service = ShardService(
        shard=shard,
        tables=tables,
        consistency=config.consistency,
        num_workers=config.workers,
        seed=config.seed,
        compression=config.compression,
        generation=generation,
        start_step=0 if resumed is None else resumed.step,
        checkpoints=checkpoints,
        journal=journal,
        buckets=buckets_of(shard, max(config.servers, 1)),
        process=process,
    )
    if resumed is not None:
        load_snapshots(service.tables, resumed, shard=shard, num_shards=max(config.servers, 1))
        service.tables.earlier_steps = earlier_steps(resumed)
    if config.checkpoint.full_every > 1:
        service.tables.changed.follow("" if resumed is None else resumed.id)
    return service
