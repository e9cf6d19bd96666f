"""The state of one job, and the scope in which a call changes it. Decides nothing."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from shardkeep.ps.control.events import Events
from shardkeep.ps.control.lifecycle import Lifecycle
from shardkeep.ps.control.losses import Losses
from shardkeep.ps.control.membership import Membership
from shardkeep.ps.control.persisted_state import PersistedState
from shardkeep.ps.control.records import Formation, JobSink, JobState, Shared
from shardkeep.ps.control.recoveries import Recoveries

Write = Callable[[], None]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a coordinator must know of its job."""

    config_yaml: str
    """The resolved config, which every member receives."""
    num_servers: int
    num_workers: int
    lease_s: float
    """Seconds without a sign of life after which a member is lost."""
    form_timeout_s: float
    """Seconds from the start until all members must have joined."""
    restarts: int = 0
    """Deaths of one member in a row, without one more trained step, that the job outlives."""
    start_step: int = 0
    """First step to train. Above 0, members load the checkpoint of that step."""
    losses: Losses = field(default_factory=Losses)
    """How many steps a recovery may lose."""
    shared: Shared | None = None
    """The folder for checkpoints if all members see it; None = the config says where they go."""
    doubt_s: float = 4.0
    """Seconds that a newcomer waits where another member has its place and may be dead."""
    run_dir: str = ""
    """The job's run folder, which members name to other jobs."""
    telemetry_s: float = 0.0
    """Seconds between two telemetry records of the coordinator; 0 = no records."""
    metrics: str | None = None
    """The address of the coordinator's metrics; None = there is none."""

    @property
    def num_members(self) -> int:
        return self.num_servers + self.num_workers


@dataclass(slots=True)
class Transaction:
    """One call's change of the job."""

    save: bool = False
    """Saves the persisted state at the end. A new version of the job's state is saved in any case."""


class Job:
    """What the parts of a coordinator share. Every access goes through `transaction` or `locked`."""

    def __init__(self, spec: JobSpec, sink: JobSink, clock: Callable[[], float]) -> None:
        self.id = secrets.token_hex(8)
        self.origin = spec.start_step
        """The step of the checkpoint that this start of the job began from; 0 = none."""
        self.clock = clock
        self.life = Lifecycle(since=clock())
        self.members = Membership(num_servers=spec.num_servers, num_workers=spec.num_workers, lease_s=spec.lease_s)
        self.recoveries = Recoveries(spec.restarts, spec.start_step, losses=replace(spec.losses))
        self.events = Events()
        self.formation: Formation | None = None
        """The last generation that formed."""
        self.closed = False
        self._sink = sink
        self._changed = threading.Condition()
        self._finished_version = self.life.now.version

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Locks the job for one call. At its end, writes events, persisted state and summary, each at most once, and
        wakes waiting calls: a caller sees no change that could still be lost. If the sink cannot keep a record (disk
        full), the job fails, not the call."""
        with self._changed:
            scope = Transaction()
            before = self.life.now
            try:
                yield scope
            finally:
                self._write_events(before)
                save = scope.save or self.life.now.version != before.version
                if save and not self.life.now.over:
                    self._write(lambda: self._sink.standing(self._state().to_record()))
                self._finish()
                if save or self.life.now.version != before.version:  # writing may have failed the job
                    self._changed.notify_all()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the job to read it."""
        with self._changed:
            yield

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Blocks, with the lock released, until `condition` holds; False after `timeout_s`. Call it `locked`."""
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
        self.members.restore(state.state.generation, state.seats)
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

    def _write_events(self, before: JobState) -> None:
        """Writes what the transaction added. If that fails, the job fails, even if the transaction completed it."""
        try:
            for kind, record in self.events.unwritten():
                if kind == "telemetry":
                    self._sink.telemetry(record)
                    continue
                write = self._sink.progress if kind == "progress" else self._sink.event
                write(record)
        except OSError as error:
            if not before.over:
                self.life.fail_unwritten(_unwritable(error))

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
        self._write(lambda: self._sink.finished(job.state, job.message, summary))

    def _write(self, write: Write) -> None:
        try:
            write()
        except OSError as error:
            self.life.fail(_unwritable(error))


def _unwritable(error: OSError) -> str:
    return f"the run folder cannot be written: {error}"
