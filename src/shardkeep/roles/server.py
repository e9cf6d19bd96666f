"""The main of a server: starts, wires and stops the parts of one process. Loads nothing that only workers need."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.assembly.service import build_service
from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import JournalError, TransportError
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.member.member import JobMember, registered
from shardkeep.member.membership import leave_if_due, tried_while_leaving
from shardkeep.member.recovery_folder import report_unkept
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.membership import LOADING
from shardkeep.ps.control.records import TRAINED, Formation, Offer, ResumeRange
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.ps.rpc.group import RpcGroup
from shardkeep.ps.server.figures import RequestTimes, figures_of, shard_record
from shardkeep.ps.server.journal.journal import GIVEN_UP, Journal, JournalRecord
from shardkeep.ps.server.service import ShardService
from shardkeep.run.checkpoints import check_needs_no_rows, resumed_from
from shardkeep.run.storage import missed
from shardkeep.trust.endpoint import Endpoint

if TYPE_CHECKING:
    from shardkeep.workers.timing.profiling import Profile

_log = EventLog("roles")
HOLDS = ResumeRange(holds=True)


def run_server(coordinator: Endpoint, **process: Any) -> int:
    """A server's life; returns 0 when the job is completed. Raises why it was not. `process`: see `JobMember`."""
    with registered("server", coordinator, **process) as member, contextlib.closing(_Life(member)) as life:
        member.live(life, Offer())
    state = member.control.state
    if state.state not in TRAINED and (error := state.error()) is not None:
        raise error
    _log.info("done")
    return 0


class _LongWork:
    """What heartbeats say that a server does, with the rows that it has loaded, replayed or written."""

    def __init__(self, control: ControlClient) -> None:
        self._control, self._phase, self._rows = control, LOADING, 0

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._control.update(phase=phase)

    def moved(self, rows: int) -> None:
        self._rows += rows
        self._control.update(phase=f"{self._phase}: {self._rows:,} rows")

    def counted(self, records: Iterable[JournalRecord]) -> Iterator[JournalRecord]:
        for record in records:
            self.moved(1)
            yield record


class _Life:
    """A server process over the generations of its job."""

    def __init__(self, member: JobMember) -> None:
        self._member, self._control, self._agreed = member, member.control, member.agreed
        config = member.config
        self._service: ShardService | None = None
        self._work = _LongWork(self._control)
        self._times = RequestTimes() if config.counts_figures else None
        self._telemetry = self._records(config)
        self._revived = HOLDS
        self._journal: Journal | None = None
        if member.kept is not None:
            self._journal = Journal(
                member.kept / "journal",
                sync=False,  # as each generation says
                limit_bytes=config.recovery.max_journal_bytes,
                on_given_up=self._journal_given_up,
            )
        self._profile = _open_profile(config, member.folder, member.index)
        if member.control.before is not None:
            self._agreed.follow(member.control.before)
            self._revive(member.control.before)

    @property
    def resume_range(self) -> ResumeRange:
        """The steps at which this server could resume. A replacement that lacks updates can follow the others, except
        in `sync`, and if it has nothing: then the others start again."""
        if self._service is None:
            return ResumeRange()
        first, last = self._service.life.resume_range
        lost_from = None if self._revived.lost_from is None else last
        return replace(self._revived, first=first, last=last, saved=self._agreed.saved, lost_from=lost_from)

    def live(self, formation: Formation) -> str | None:
        """Serves one generation, to the end of the job or of the generation: then how it was lost."""
        service = self._service_for(formation)
        if lost := service.life.begin(formation.generation, formation.start_step, sync=formation.journal == "fsync"):
            _log.warning("pushes lost", step=formation.start_step, pushes=lost)
        try:
            transport = self._join(formation)
        except TransportError as error:
            if not self._member.config.recovery.restarts:
                raise
            service.life.suspend(str(error))
            return str(error)
        self._control.update(step=formation.start_step)
        self._work.enter("serving")
        _log.info("serving", generation=formation.generation, tables=len(formation.tables))
        why = f"server {self._member.index} left"
        try:
            with self._member.departure.postponed(self._member.config.liveness.grace_s):
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
        self._revived = HOLDS
        return self._service

    def _join(self, formation: Formation) -> RpcGroup:
        handle = self._handle
        if self._times is not None:
            handle = self._times.timed(handle)
        if self._profile is not None:
            handle = self._profile.led(handle)
        return self._member.join_group(formation, handle)

    def _wait(self, generation: int) -> None:
        """Until the job is over or the generation is lost. Raises Leaving when this server alone is to leave."""
        departure, control, telemetry = self._member.departure, self._control, self._telemetry

        def is_to_leave() -> bool:  # each heartbeat comes by here
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
        figures = figures_of(lambda: self._service, self._times, metrics=self._member.metrics.address)
        self._member.metrics.show_server(figures)
        return TelemetryRecords.every(
            config.telemetry_s, figures=figures, record=shard_record, report=self._control.report
        )

    def _to_disk(self) -> None:
        """Of a server that leaves: the journal."""
        if self._member.departure.asked and self._journal is not None:
            with tried_while_leaving():
                self._journal.to_disk()

    def close(self) -> None:
        """Ends what serves; a completed job needs nothing that was kept."""
        if self._profile is not None:
            self._profile.close()
        if self._journal is not None:
            self._journal.close()
        if self._control.state.state in TRAINED and self._member.kept is not None:
            shutil.rmtree(self._member.kept, ignore_errors=True)

    def _revive(self, before: Formation) -> None:
        """Makes this server what the one before was when it died: the last checkpoint, and what is whole of the
        journal after it."""
        resumed = self._agreed.checkpoints.latest() if self._agreed.looks else None
        since = 0 if resumed is None else resumed.step
        why = self._missing(since)
        service = self._service = self._build(before.tables, resumed)
        if why and self._journal is not None:
            self._journal.clear()
            self._journal.build_on(since)
        self._work.enter(LOADING)
        pushes = service.life.replay(self._work.counted([] if self._journal is None else self._journal.replay()))
        self._work.enter("loaded")
        step, end = service.life.resume_range[1], None if self._journal is None else self._journal.end
        follows = not service.applier.gate.stages and (resumed is not None or step > 0)
        file, byte = ("", 0) if end is None else (str(end.path), end.byte)
        self._revived = replace(HOLDS, lost_from=step if follows else None, why=why, file=file, byte=byte)
        if end is not None and end.dropped >= 0:
            _log.warning("journal cut", file=str(end.path), byte=end.byte, had_step=end.dropped)
        if why:
            _log.warning(why)
        _log.info("revived", checkpoint=since, pushes=pushes, step=step)

    def _missing(self, step: int) -> str:
        """What the checkpoint of `step` lacks to make this server what the one before was; "" = nothing."""
        if self._journal is None:
            return f"server {self._member.index} keeps no journal"
        try:
            base = self._journal.base
        except JournalError as error:
            return f"the journal of server {self._member.index} is of no use: {error}"
        if base == GIVEN_UP:
            return f"the journal of server {self._member.index} was given up"
        if not self._journal.size_bytes:
            return missed(self._control, "its journal")
        if base <= step:
            return ""
        return (
            f"the journal of server {self._member.index} begins after the checkpoint of step {base}, "
            f"which is missing in {self._agreed.checkpoints.folder}"
        )

    def _journal_given_up(self, why: str) -> None:
        text = f"the journal of server {self._member.index} is given up until the next checkpoint: {why}"
        report_unkept(self._control, "journal", f"{text}; the server cannot be replaced now")

    def _build(self, tables: Sequence[TableSpec], resumed: Checkpoint | None) -> ShardService:
        if resumed is None:
            check_needs_no_rows(tables, self._agreed.checkpoints.folder)
        self._work.enter(LOADING)
        service = build_service(
            self._member.config,
            tables,
            shard=self._member.index,
            generation=0,
            checkpoints=self._agreed.checkpoints,
            resumed=resumed,
            journal=self._journal,
            process=lambda: self._member.facts() | {"control_bytes": self._member.control_bytes},
            moved=self._work.moved,
        )
        self._work.enter("loaded")
        return service

    def _handle(self, *messages: Bytes) -> Future[Bytes]:
        assert self._service is not None
        return self._service.handle(*messages)


def _open_profile(config: JobConfig, folder: Path, index: int) -> Profile | None:
    if config.profile.steps == "off":
        return None
    from shardkeep.workers.timing.profiling import open_profile  # a server needs nothing else of this room

    return open_profile(config.profile, folder, "server", index)
