"""The state of one job, and the scope in which a call changes it. Decides nothing."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardkeep.base.errors import CheckpointError, ProtocolError, Superseded, UserError
from shardkeep.base.system_errors import in_words
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.events import Events
from shardkeep.ps.control.membership import Seat, Seats
from shardkeep.ps.control.record_forms import from_json_types, to_json_types
from shardkeep.ps.control.records import PROTOCOL_VERSION, Formation, JobSink, JobState, Record, Shared
from shardkeep.ps.control.recovery import Losses, Recoveries


@dataclass(frozen=True, slots=True)
class JobDeadlines:
    """How long a coordinator waits, in seconds."""

    lease_s: float
    """Without a sign of life after which a member is lost."""
    form_s: float
    """Since the last member came until all must have joined."""
    replace_s: float = 900.0
    """The same while a lost member is not replaced."""
    doubt_s: float = 9.0
    """That a newcomer waits where another member has its seat and may be dead."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a coordinator must know of its job."""

    config_yaml: str
    """The resolved config, which every member receives."""
    num_servers: int
    num_workers: int
    deadlines: JobDeadlines
    restarts: int = 0
    """Deaths of one member in a row, without one more trained step, that the job outlives."""
    start_step: int = 0
    """First step to train. Above 0, members load the checkpoint of that step."""
    losses: Losses = field(default_factory=Losses)
    """How many steps a recovery may lose."""
    shared: Shared | None = None
    """The folder for checkpoints if all members see it; None = the config says where they go."""
    run_dir: str = ""
    """The job's run folder, which members name to other jobs."""
    telemetry_s: float = 0.0
    """Seconds between two telemetry records of the coordinator; 0 = no records."""
    metrics: str | None = None
    """The address of the coordinator's metrics; None = there is none."""
    settings: Record = field(default_factory=dict)
    """What all members must read alike in the config; {} = anything."""

    @property
    def num_members(self) -> int:
        return self.num_servers + self.num_workers


FORMING = JobState()


class Lifecycle:
    """One job's state and its legal changes. The first failure stays, unless it was only a symptom and its cause shows
    later.

               ┌─> recovering ─┐
    forming ───┴─> training <──┴──> completed, or incomplete
       │               │
       ├───────────────┼──> failed      (recovering goes there, too)
       └───────────────┴──> stopping ──> stopped      (completed or incomplete, if the last step was trained by then)
    """

    def __init__(self, now: JobState = FORMING, *, since: float = 0.0) -> None:
        self.now = now
        self.since = since
        """The time, by the job's clock, since which the group forms."""
        self.came = since
        """The time when a member last came or was lost."""
        self.symptom = False
        """Whether the job failed by what another's failure did to a member."""

    @property
    def forms(self) -> bool:
        """Whether members must still join."""
        return self.now.state in ("forming", "recovering")

    @property
    def running(self) -> bool:
        """Neither over nor about to be."""
        return self.now.state in ("forming", "training", "recovering")

    def formed(self, generation: int) -> None:
        self._become("training", generation=generation, message="")

    def recovering(self, message: str, *, since: float) -> None:
        """Ends the generation; the members form another one."""
        self.since, self.came = since, max(self.came, since)
        self._become("recovering", message=message)

    def complete(self, lacks: str) -> None:
        """All steps are trained. `lacks`: what the job was to keep and did not; "" = it has all."""
        self._become("incomplete" if lacks else "completed", message=lacks, exit_code=1 if lacks else 0)

    def stopping(self, reason: str) -> None:
        self._become("stopping", message=reason)

    def stopped(self, message: str) -> None:
        self._become("stopped", message=message, exit_code=1)

    def fail(self, message: str, *, exit_code: int = 1, lost: bool = False, symptom: bool = False) -> bool:
        """Returns whether this failure is now the job's."""
        better = self.now.state == "failed" and self.symptom and not symptom
        if not (self.running or self.now.state == "stopping" or better):
            return False
        self.symptom = symptom
        self._become("failed", message=message, exit_code=exit_code, lost=lost)
        return True

    def fail_unwritten(self, message: str) -> None:
        """Fails a job whose summary cannot be written, however it ended."""
        self.symptom = False
        self._become("failed", message=message, exit_code=1, lost=False)

    def _become(self, state: str, **changes: object) -> None:
        self.now = replace(self.now, state=state, version=self.now.version + 1, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PersistedState:
    """The state of a job. `seats` contain the members' tokens, so only this user may read it."""

    job: str
    origin: int
    state: JobState
    formation: Formation | None
    seats: tuple[Seat, ...]
    recoveries: Recoveries
    summary: Record | None
    warnings: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION

    def to_record(self) -> Record:
        """The state as JSON types."""
        tables: list[Any] = []
        record: Record = to_json_types(self, tables)
        return {**record, "tables": [[table.model_dump(mode="json") for table in each] for each in tables]}

    @classmethod
    def from_record(cls, record: Record) -> PersistedState:
        """The inverse. Raises UserError for an invalid record."""
        if (version := record.get("protocol_version")) != PROTOCOL_VERSION:
            text = f"the job's state is of control protocol {version or 'before 5'}, and this shardkeep speaks"
            raise UserError(f"{text} {PROTOCOL_VERSION}; continue with the version that began the job")
        try:
            fields = dict(record)
            tables: list[Any] = [tuple(map(TableSpec.of_record, each)) for each in fields.pop("tables")]
            return from_json_types(cls, fields, tables)
        except (LookupError, TypeError, ValueError, AttributeError, CheckpointError, ProtocolError) as error:
            text = f"the coordinator's stored state of the job is damaged ({type(error).__name__}: {error})"
            raise UserError(text) from error


@dataclass(slots=True)
class Transaction:
    """One call's change of the job."""

    save: bool = False
    """Saves the persisted state at the end. A new version of the job's state is saved in any case."""
    wake: bool = False
    """Wakes waiting calls at the end. A new version of the job's state wakes them in any case."""


class CoordinatedJob:
    """What the parts of a coordinator share. Every access goes through `transaction` or `locked`.

    Both return once everything that the caller changed and saw is on disk: no answer can be lost. One call writes for
    all that came while another wrote."""

    def __init__(self, spec: JobSpec, sink: JobSink, clock: Callable[[], float]) -> None:
        self.id = secrets.token_hex(8)
        self.origin = spec.start_step
        """The step of the checkpoint that this start of the job began from; 0 = none."""
        self.clock = clock
        self.life = Lifecycle(since=clock())
        lease_s = spec.deadlines.lease_s
        self.members = Seats(num_servers=spec.num_servers, num_workers=spec.num_workers, lease_s=lease_s)
        self.recoveries = Recoveries(spec.restarts, spec.start_step, losses=replace(spec.losses))
        self.events = Events()
        self.formation: Formation | None = None
        """The last generation that formed."""
        self.closed = False
        self.kept = self.life.now
        """The job's state as it is on disk, and so what members may learn."""
        self._sink = sink
        self._writing, self._changed = threading.Lock(), threading.Condition()  # taken in this order
        self._changes, self._kept_changes, self._wakes = 0, 0, False
        self._finished_version = self.life.now.version

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Locks the job for one call. At its end, writes events, then the persisted state or the summary, and wakes
        waiting calls. If the sink cannot keep the summary (disk full), the job fails, not the call. Raises Superseded
        if another coordinator leads; nobody learns of the change then."""
        scope = Transaction()
        with self.locked():
            before = self.life.now.version
            try:
                yield scope
            finally:
                with self._unless_superseded():
                    self._write_events()
                changed, over = self.life.now.version != before, self.life.now.over
                self._wakes |= scope.wake or changed or over  # who waits for the last member to leave
                self._changes += scope.save or changed or (over and self.life.now.version != self._finished_version)

    @contextlib.contextmanager
    def _unless_superseded(self) -> Iterator[None]:
        try:
            yield
        except Superseded:
            self.life.now = self.kept
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the job to read it."""
        try:
            with self._changed:
                yield
        finally:
            self._keep(self._changes)

    def _keep(self, changes: int) -> None:
        """Returns once so many changes are on disk, with all that came meanwhile. Call it without the lock."""
        if self._kept_changes >= changes:
            return
        with self._writing, self._unless_superseded():
            if self._kept_changes >= changes:  # another call has written for this one
                return
            with self._changed:
                changes, wakes, self._wakes = self._changes, self._wakes, False
                self._finish()
                now = self.life.now
                record = {} if now.over else self._state().to_record()
            if not now.over:
                self._sink.standing(record)
            self.kept, self._kept_changes = now, changes  # in this order, for those who only look at the second
            if wakes:
                with self._changed:
                    self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Blocks, with the lock released, until `condition` holds; False after `timeout_s`. Call it with the lock."""
        return self._changed.wait_for(condition, timeout_s)

    def close(self) -> None:
        """Wakes all waiting calls."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    @property
    def waits(self) -> bool:
        """Whether a call may wait for the job to form."""
        return self.life.running and not self.closed

    def write_members(self, formation: Formation) -> None:
        """Writes the members of a generation before they learn of it. Raises OSError."""
        self._sink.members(formation.generation, formation.members)

    def restore(self, state: PersistedState) -> None:
        """Takes over the state of a coordinator that died."""
        self.id, self.origin, self.formation = state.job, state.origin, state.formation
        self.life = Lifecycle(state.state, since=self.life.since)
        now = self.clock()
        self.members.restore(state.state.generation, [replace(seat, last_seen=now, moved=now) for seat in state.seats])
        before, losses = state.recoveries, replace(state.recoveries.losses, most=self.recoveries.losses.most)
        self.recoveries = replace(before, restarts=self.recoveries.restarts, losses=losses)
        self.events.restore(state.summary, state.warnings, state.recoveries.done)

    def _state(self) -> PersistedState:
        return PersistedState(
            job=self.id,
            origin=self.origin,
            state=self.life.now,
            formation=self.formation,
            seats=tuple(self.members.seats()),
            recoveries=self.recoveries,
            summary=self.events.summary,
            warnings=tuple(self.events.warnings),
        )

    def _write_events(self) -> None:
        """Writes what the transaction added."""
        writes = {"telemetry": self._sink.telemetry, "progress": self._sink.progress}
        for kind, record in self.events.unwritten():
            writes.get(kind, self._sink.event)(record)

    def _finish(self) -> None:
        """Writes the summary of a job that is over; again if a better message follows."""
        job, events = self.life.now, self.events
        if not job.over or job.version == self._finished_version:
            return
        self._finished_version = job.version
        summary = events.whole_summary() or events.closing
        if self.recoveries.done:
            summary = {**(summary or {}), "recoveries": self.recoveries.done}
        if events.warnings:
            summary = {**(summary or {}), "warnings": events.warnings}
        if self.life.symptom:
            summary = {**(summary or {}), "symptom": True}
        try:
            self._sink.finished(job.state, job.message, summary)
        except OSError as error:
            if job.state != "failed":
                self.life.fail_unwritten(f"the run folder cannot be written: {in_words(error)}")
