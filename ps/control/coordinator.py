"""The coordinator's logic: admits members, forms generations, watches leases, decides how the job ends.

No sockets and no threads of its own: the servicer calls it from many threads, a ticker calls `tick`. One
lock guards all.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardkeep.base.errors import ConfigError, JobError, ProtocolError, ShardkeepError
from shardkeep.base.exit_codes import signal_left_on
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.agreement import agreed_data, agreed_tables
from shardkeep.ps.control.events import Chronicle, time_of_day
from shardkeep.ps.control.lifecycle import Lifecycle
from shardkeep.ps.control.losses import Losses
from shardkeep.ps.control.membership import Membership, Seat
from shardkeep.ps.control.persisted_state import Standing
from shardkeep.ps.control.records import (
    ANYWHERE,
    NOTHING_KEPT,
    Admission,
    Formation,
    Hello,
    JobSink,
    JobState,
    Kept,
    Member,
    Record,
    Shared,
    Span,
    Status,
)
from shardkeep.ps.control.recovery import Recoveries, Start, agreed_start, last_saved, meanwhile, sentence
from shardkeep.ps.control.versions import check_versions, own_versions

TAKEOVER_VERSIONS = 1_000_000
LOAD_S = 1800.0
"""Seconds more for members that are there and load a checkpoint and a journal."""
SILENT_S = 3.0
"""Some heartbeats long: a member that has been lost sight of is dead, if another is started in its place."""
STOP_PATIENCE_S = 600.0
"""A job that was asked to stop is over after this time, whoever has not left by then."""


class Coordinator:
    """One job.

    Args:
        config_yaml: The resolved config, handed to every member.
        num_servers: Server processes.
        num_workers: Worker processes.
        lease_s: Seconds without a sign of life after which a member is lost.
        form_timeout_s: Seconds from now until all members must have joined.
        open_store: Opens (or returns) the TCPStore for a generation; its host and port.
        sink: Who keeps the records.
        clock: Seconds, monotonic.
        start_step: First step to train; above 0 on resume.
        restarts: Deaths of one member in a row, without one more trained step, that the job outlives.
        close_store: Ends the store of a generation that is given up: whoever still forms it hears of it at once.
        standing: What another coordinator of the job kept before it died; None = a new job. Raises UserError when it
            cannot be read.
        losses: How far the job may go back; None = as far as it has to.
        shared: The folder where checkpoints go if all members see it; None = the config says where they go.
        run_dir: The job's run folder, which members name to other jobs.
        versions: What members' versions are compared with; None = this process's.
    """

    def __init__(
        self,
        *,
        config_yaml: str,
        num_servers: int,
        num_workers: int,
        lease_s: float,
        form_timeout_s: float,
        open_store: Callable[[int], tuple[str, int]],
        sink: JobSink,
        clock: Callable[[], float] = time.monotonic,
        start_step: int = 0,
        restarts: int = 0,
        close_store: Callable[[], None] = lambda: None,
        standing: Record | None = None,
        losses: Losses | None = None,
        shared: Shared | None = None,
        run_dir: str = "",
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.job = secrets.token_hex(8)
        self.config_yaml = config_yaml
        self.lease_s = lease_s
        self.form_timeout_s = form_timeout_s
        self._open_store, self._close_store = open_store, close_store
        self._sink = sink
        self._clock = clock
        self._origin = start_step
        self._recoveries = Recoveries(restarts, start_step, losses=losses or Losses())
        self._shared, self._run_dir = shared, run_dir
        self._checkpoints: str | None = None  # settled when all members have joined for the first time
        self._versions = own_versions() if versions is None else versions
        self._changed = threading.Condition()
        self._life = Lifecycle()
        self._members = Membership(num_servers=num_servers, num_workers=num_workers, lease_s=lease_s)
        self._chronicle = Chronicle(sink)
        self._formation: Formation | None = None
        self._handed_down: Formation | None = None  # by the coordinator before this one
        self._began = self._last_tick = clock()  # of forming, or of forming again
        self._stop_limit_s, self._stop_by = STOP_PATIENCE_S, self._began + STOP_PATIENCE_S
        self._closed = False
        if standing is not None:
            self._take_over(Standing.from_record(standing, self._began))

    def _take_over(self, before: Standing) -> None:
        """Goes on where another coordinator died. Members notice nothing, but that it did not answer for a while."""
        self.job, self._origin, self._formation = before.job, before.origin, before.formation
        self._handed_down = before.formation
        # of another version than any that members have seen
        self._life = Lifecycle(replace(before.state, version=before.state.version + TAKEOVER_VERSIONS))
        self._members.restore(before.state.generation, before.seats)
        losses = replace(before.recoveries.losses, most=self._recoveries.losses.most)
        self._recoveries = replace(before.recoveries, restarts=self._recoveries.restarts, losses=losses)
        self._checkpoints = None if before.formation is None else before.formation.checkpoints
        self._chronicle.summary, self._chronicle.warnings = before.summary, list(before.warnings)
        for told in self._recoveries.done:
            self._chronicle.recall("recovery", told)
        record = self._recoveries.outlived(before.state.generation, time=time_of_day())
        self._tell_recovery(record, meanwhile(before.state))
        if (formation := before.formation) is not None:
            self._keep(lambda: self._chronicle.formed(formation, f"took over generation {formation.generation}"))

    @property
    def num_members(self) -> int:
        return sum(self._members.counts.values())

    @property
    def state(self) -> JobState:
        return self._life.now

    def register(self, hello: Hello) -> Admission:
        """Admits a member. A repeated Hello is welcome.

        Raises ProtocolError (versions), ConfigError (no such place), UserError (place taken), JobError (late).
        """
        with self._changed:
            check_versions(hello, self._versions)
            if not self._members.known(hello.token):
                self._members.check_place(hello.member.role, hello.member.index)
                self._make_room(hello.member)
                self._refuse_when_late(hello)
                self._members.admit(hello.member, hello.token, self._clock())
                self._keep(lambda: self._chronicle.note(f"{hello.member} registered"))
                self._keep_standing()
            kept = self._members.seat(hello.token).kept
            shared = self._shared if self._formation is None else None
            return Admission(self.config_yaml, self.lease_s, self._formation, kept, shared, self._run_dir)

    def join(
        self,
        token: str,
        tables: Sequence[TableSpec] | None,
        *,
        data: str = "",
        span: Span = ANYWHERE,
        after: int = 0,
        why: str = "",
        kept: Kept = NOTHING_KEPT,
        unseen: str = "",
        wait_s: float = 0.0,
    ) -> tuple[JobState, Formation | None]:
        """The member is ready to form. Blocks up to `wait_s`; None = not yet: look at the state, call again.

        Args:
            token: Names the member.
            tables: What a worker derived from config and data; None for servers.
            data: The fingerprint of the data that a worker has opened; "" = not known.
            span: Where the member could go on.
            after: The generation that the member has lost; 0 = it was in none.
            why: How it lost it.
            kept: Where it keeps what its replacement needs; nothing = as it said before.
            unseen: Why it cannot use the shared folder; "" = it can.
            wait_s: Seconds to wait for the formation.
        """

        def formed() -> Formation | None:
            waits = self._formation is None or self._formation.generation <= after or not self._life.running
            return None if waits or self._life.now.state == "recovering" else self._formation

        with self._changed:
            seat = self._touch(token)
            seat.kept = kept if kept.folder else seat.kept
            seat.unseen = unseen or seat.unseen
            if self._chronicle.summary is not None:  # all that was to be done is done
                self._let_go(seat)
                self._changed.wait_for(lambda: not self._waits, wait_s)
                return self._life.now, None
            if self._handed_down is not None and formed() is self._handed_down:  # its store died with its coordinator
                self._give_up_generation(f"the coordinator was restarted while {seat.member} was joining")
            if after and after == self._members.generation and self._life.now.state == "training":
                self._give_up_generation(f"{seat.member} lost the others: {why}")
            if formed() is None:
                seat.joined, seat.span = True, span
                seat.tables, seat.data = None if tables is None else tuple(tables), data
                self._form_if_complete()
                self._changed.wait_for(lambda: formed() is not None or not self._waits, wait_s)
            return self._life.now, formed()

    def heartbeat(
        self, token: str, *, step: int = -1, phase: str = "", unsent_rows: int = 0, seen: int = 0, wait_s: float = 0.0
    ) -> JobState:
        """Renews the lease; blocks up to `wait_s` while the state's version is still `seen`."""
        with self._changed:
            seat = self._touch(token)
            seat.phase, seat.unsent_rows = phase, unsent_rows
            if step not in (-1, seat.step):  # what was told before may be of before the job went back
                seat.step = step
                if seat.member.role == "worker" and self._recoveries.trained(step):
                    self._keep_standing()
            self._changed.wait_for(lambda: self._life.now.version != seen or self._closed, wait_s)
            return self._life.now

    def report(self, token: str, *, sequence: int, kind: str, record: Record) -> JobState:
        """Takes one record; one taken already (a resent sequence) is ignored. Raises ProtocolError."""
        with self._changed:
            seat = self._touch(token)
            if sequence > seat.last_sequence:
                seat.last_sequence = sequence
                self._keep(lambda: self._chronicle.report(seat.member, kind, record))
                if self._recoveries.heard(seat.member, kind, record) or kind == "summary":
                    self._keep_standing()
            return self._life.now

    def leave(
        self, token: str, *, code: int, message: str = "", symptom: bool = False, refused: bool = False
    ) -> JobState:
        """The member ends with exit code `code`. `symptom`: the message tells of another's failure. `refused`: it
        cannot take its place, for which the job waits on.

        A member that leaves on a signal is lost as if it had died, but needs nobody to end it."""
        with self._changed:
            seat = self._touch(token)
            if signal_left_on(code) is not None:
                if not seat.gone:
                    self._lose(seat, f"{seat.member} {message}, {self._last_step(seat)}", ended=True)
            elif refused and self._recoveries.on and self._life.running:
                seat.lost = True
                self._keep(lambda: self._chronicle.note(f"{seat.member} was refused: {message}"))
                self._keep_standing()
            elif seat.left_code is None:
                seat.left_code = code
                self._after_leaving(seat, message, symptom)
                self._keep_standing()
                self._changed.notify_all()
            return self._life.now

    def lost(self, role: str, index: int, *, pid: int = 0, reason: str) -> JobState:
        """A launcher saw the member's process end; `pid` 0 = any. One that left, or was lost before, is no news."""
        with self._changed:
            self._members.check_place(role, index)
            seat = self._members.at(role, index)
            if seat is None and self._recoveries.on:
                self._keep(lambda: self._chronicle.note(f"{role} {index} ended before it registered: {reason}"))
            elif seat is None:
                self._fail(f"{role} {index} ended before it registered: {reason}", lost=True)
            elif not seat.gone and pid in (0, seat.member.pid):
                self._lose(seat, f"{seat.member} ended: {reason}, {self._last_step(seat)}")
            return self._life.now

    def stop(self, reason: str, *, limit_s: float = STOP_PATIENCE_S) -> JobState:
        """Ends the job in order: workers finish their running step, perhaps one more, and leave.

        `limit_s`: seconds from now after which the job is over anyway; a later call can only bring the end nearer."""
        with self._changed:
            running = self._life.running
            if running or self._clock() + limit_s < self._stop_by:
                self._stop_limit_s, self._stop_by = limit_s, self._clock() + limit_s
            if running:
                self._life.stopping(reason)
                self._keep(lambda: self._chronicle.note(f"stopping: {reason}"))
                self._stop_if_idle()
                self._keep_standing()
                self._changed.notify_all()
            return self._life.now

    def status(self) -> Status:
        with self._changed:
            job, told, now = self._life.now, self._chronicle, self._clock()
            forms = job.state in ("forming", "recovering")
            return Status(
                state=job.state,
                message=job.message,
                exit_code=job.exit_code,
                generation=job.generation,
                members=tuple(seat.status(now) for seat in self._members.seats()),
                progress=told.progress,
                evaluation=told.evaluation,
                summary=told.summary,
                events=told.events,
                missing=tuple(self._members.missing()) if forms else (),
                left_s=max(0.0, self._form_limit_s - (now - self._began)) if forms else 0.0,
            )

    def tick(self) -> None:
        """Looks at leases and deadlines; to be called several times per lease."""
        with self._changed:
            now = self._clock()
            gap, self._last_tick = now - self._last_tick, now
            if gap > self.lease_s / 2:  # this process stood still (suspended, swapped out): it could hear nobody
                self._members.forgive(gap)
                self._began += gap
            for seat in self._members.expired(now):
                silent = f"sent no heartbeat for {self.lease_s:g} s (lease_s)"
                self._lose(seat, f"{seat.member} {silent}, {self._last_step(seat)}")
            if self._life.now.state in ("forming", "recovering") and now - self._began > self._form_limit_s:
                cause = f"{self._recoveries.cause}; " if self._life.now.state == "recovering" else ""
                limit = f"{self.form_timeout_s:g} s (form_timeout_s)"
                missing = ", ".join(self._members.missing())
                self._fail(f"{cause}the job did not form within {limit}; missing: {missing}")
            if self._life.now.state == "stopping" and now > self._stop_by:
                self._stopped(self._late())

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Blocks until the job is over; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._life.now.over or self._closed, timeout_s)

    def wait_drained(self, timeout_s: float) -> bool:
        """Blocks until every member has left or is lost, so that a process that is over may end."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._members.present() or self._closed, timeout_s)

    def keep_standing(self) -> None:
        """Keeps what another coordinator needs to take over; to be called before members can know the address."""
        with self._changed:
            self._keep_standing()

    def close(self) -> None:
        """Wakes all who wait; for the end of the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _form_limit_s(self) -> float:
        """Longer while a replacement that is here loads what it goes on with."""
        loading = self._life.now.state == "recovering" and not self._members.vacant()
        return self.form_timeout_s + (LOAD_S if loading else 0.0)

    @property
    def _waits(self) -> bool:
        return self._life.running and not self._closed

    def _touch(self, token: str) -> Seat:
        """The member's place, with its lease renewed. Raises ProtocolError when it has none any more."""
        seat = self._members.seat(token)
        if seat.lost and self._life.running:
            raise ProtocolError(f"{seat.member} was taken for dead, and the job went on without it")
        seat.last_seen = self._clock()
        return seat

    def _last_step(self, seat: Seat) -> str:
        """For a sentence: where a lost member, or else the job, was. Servers count no steps of their own."""
        steps = [s.step for s in self._members.seats("worker")] + [int(self._chronicle.progress.get("step", -1))]
        if max(steps) < 0 or (seat.member.role == "worker" and seat.step >= 0):
            return seat.last_step
        return f"the job was at step {max(steps)}{' or later' if self._recoveries.untold else ''}"

    def _refuse_when_late(self, hello: Hello) -> None:
        job = self._life.now
        if job.over or job.state == "stopping":
            told = f": {job.message}" if job.message else ""
            raise JobError(f"{hello.member.name} comes too late, the job is {job.state}{told}")
        held = self._members.at(hello.member.role, hello.member.index)
        if held is not None and held.gone and not (self._recoveries.on and held.lost):
            raise JobError(f"{hello.member.name} was in the job already ({held.member}) and cannot be replaced")

    def _let_go(self, seat: Seat) -> None:
        if self._life.running and seat.member.role == "worker" and seat.left_code is None:
            seat.left_code = 0
            self._complete_if_all_left()

    def _make_room(self, newcomer: Member) -> None:
        """Takes the member before `newcomer` for dead, sooner than its lease: it was lost sight of when the others lost
        it, and now somebody has started another."""
        held = self._members.at(newcomer.role, newcomer.index)
        if self._life.now.state == "recovering" and held is not None and not (held.gone or held.joined):
            silent_s = self._clock() - held.last_seen
            if silent_s > min(SILENT_S, self.lease_s):
                self._lose(held, f"{held.member} sent no heartbeat for {silent_s:.0f} s, and was started again")

    def _form_if_complete(self) -> None:
        again = self._life.now.state == "recovering"
        if not (again or self._life.now.state == "forming") or self._members.missing():
            return
        try:
            self._formation = self._new_formation(again)
        except ShardkeepError as error:
            self._fail(str(error), exit_code=error.exit_code)
        except (OSError, RuntimeError) as error:
            self._fail(f"the generation cannot be opened: {error}")
        else:
            formation = self._formation
            self._life.formed(formation.generation)
            self._keep(lambda: self._chronicle.formed(formation, f"generation {formation.generation} formed"))
            if again:
                start, seconds = Start(formation.start_step, formation.source), self._clock() - self._began
                record = self._recoveries.over(formation.generation, start, seconds, time=time_of_day())
                self._tell_recovery(record, sentence(record))
            self._recoveries.clear()
            self._keep_standing()
            self._changed.notify_all()

    def _tell_recovery(self, record: Record, text: str) -> None:
        self._keep(lambda: self._chronicle.tell("recovery", {**record, "text": text}))

    def _new_formation(self, again: bool) -> Formation:
        spans = [{s.member.index: s.span for s in self._members.seats(role)} for role in ("server", "worker")]
        start = self._start_again(*spans) if again else Start(self._recoveries.saved_step)
        if not again and self._shared is not None and self._checkpoints is None:
            self._settle_checkpoints(self._shared)
        workers = self._members.seats("worker")
        tables = agreed_tables([(seat.member, seat.tables) for seat in workers])
        data, remarks = agreed_data([(seat.member, seat.data) for seat in workers], self._formation)
        members = tuple(seat.member for seat in self._members.present())
        generation = self._members.generation + 1
        host, port = self._open_store(generation)
        self._sink.members(generation, members)  # durable before it is used
        self._members.generation = generation
        if remarks:
            self._keep(lambda: self._chronicle.tell("data", {"text": "; ".join(remarks)}))
        where = (start.step, start.source, start.lacking, self._origin)
        return Formation(generation, host, port, members, tables, *where, data, self._checkpoints)

    def _start_again(self, servers: Mapping[int, Span], workers: Mapping[int, Span]) -> Start:
        """Where a generation follows another. Raises JobError when too much would be lost."""
        spans = [*servers.values(), *workers.values()]
        reported = self._recoveries.saved_step
        self._recoveries.saved_step = saved = last_saved(reported, spans)
        if saved < reported:
            self._keep(lambda: self._chronicle.warn(f"the checkpoint of step {reported} is missing"))
        start = agreed_start(servers, workers) or Start(saved)
        if (refusal := self._recoveries.refusal(start, servers, workers)) is not None:
            raise JobError(refusal)
        return start

    def _settle_checkpoints(self, shared: Shared) -> None:
        """Decides whether checkpoints go to the shared folder. Raises ConfigError when they must, and cannot."""
        unseen = [f"{seat.member.name}: {seat.unseen}" for seat in self._members.present() if seat.unseen]
        self._checkpoints = "" if unseen else shared.folder
        if not unseen:
            self._keep(lambda: self._chronicle.note(f"checkpoints go to {shared.folder}, which all members see"))
            return
        why = f"not all members can use {shared.folder} ({unseen[0]})"
        if shared.needed_by:
            raise ConfigError(f"{shared.needed_by}: {why}; set checkpoint.dir to a folder that all members share")
        self._recoveries.losses.period = 0
        text = f"no checkpoints are kept: {why}; set checkpoint.dir to a folder that all members share"
        self._keep(lambda: self._chronicle.warn(text))

    def _give_up_generation(self, symptom: str = "") -> None:
        """The members leave the running generation, and come back to form another."""
        if symptom and (problem := self._recoveries.seen(symptom)) is not None:
            self._fail(problem, symptom=True)
            return
        left = next((seat for seat in self._members.seats("worker") if seat.left_code is not None), None)
        if left is not None:  # nobody is admitted in its place: the next generation would never form
            text = f"{self._recoveries.cause}; {left.member} had left by then, and nobody can replace it"
            self._fail(text, lost=not symptom, symptom=bool(symptom))
            return
        for seat in self._members.seats():
            seat.joined = False
        self._life.recovering(self._recoveries.cause)
        self._began = self._clock()
        self._close_store()  # a member may still be forming
        self._keep(lambda: self._chronicle.note(f"recovering: {self._recoveries.cause}"))
        self._keep_standing()
        self._changed.notify_all()

    def _after_leaving(self, seat: Seat, message: str, symptom: bool) -> None:
        state, code = self._life.now.state, seat.left_code or 0
        told = f": {message}" if message else ""
        self._keep(lambda: self._chronicle.note(f"{seat.member} left with code {code}{told}"))
        if state == "stopping":
            self._stop_if_idle()
        elif code == 2:  # the user's own mistake is told as it is: it names a file or a key, not a process
            self._fail(message or f"{seat.member} refused its input", exit_code=2)
        elif code:
            self._fail(f"{seat.member} failed (exit code {code}){told}", symptom=symptom)
        elif state == "forming" or (self._life.running and seat.member.role == "server"):
            self._fail(f"{seat.member} left before the job was done{told}")
        elif state == "recovering" and self._chronicle.summary is None:
            self._fail(f"{self._recoveries.cause}; {seat.member} left before the job was done{told}")
        elif self._life.running:
            self._complete_if_all_left()

    def _complete_if_all_left(self) -> None:
        if not all(seat.gone for seat in self._members.seats("worker")):
            return
        if self._chronicle.summary is None:
            self._fail("all workers are done, but worker 0 reported no summary")
            return
        self._life.complete()
        self._finished()

    def _stop_if_idle(self) -> None:
        if self._chronicle.summary is not None:  # the stop came after the last step: the job is done
            self._complete_if_all_left()
        elif all(seat.gone for seat in self._members.seats("worker")):
            self._stopped()

    def _late(self) -> str:
        """A remark on a job that did not stop in time."""
        late, saved = len(self._members.present()), self._recoveries.saved_step
        from_where = f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint"
        return (
            f" ({late} {'member' if late == 1 else 'members'} did not leave in {self._stop_limit_s:g} s; {from_where})"
        )

    def _stopped(self, remark: str = "") -> None:
        saved = self._recoveries.saved_step or -1  # of its end, perhaps, which no heartbeat has told
        step = max([saved, *(seat.step for seat in self._members.seats("worker"))])
        where = f"at step {step}" if step >= 0 else "before the first step"
        self._life.stopped(f"stopped {where}: {self._life.now.message}{remark}")
        self._finished(({"steps": step} if step >= 0 else {}) | self._chronicle.figures)

    def _lose(self, seat: Seat, message: str, *, ended: bool = False) -> None:
        """`ended`: the process ends by itself; a launcher is not to kill it."""
        seat.lost = True
        self._changed.notify_all()
        m = seat.member
        process = {} if ended else {"lost_pid": m.pid}
        self._keep(lambda: self._chronicle.note(message, lost=m.role, lost_index=m.index, **process))
        if self._life.now.state == "stopping":
            self._stop_if_idle()
        elif self._chronicle.summary is not None and self._life.running:
            self._complete_if_all_left()  # all that it had to do is done
        elif (
            self._life.running
            and (problem := self._recoveries.count_death(m, message, unsent_rows=seat.unsent_rows)) is not None
        ):
            self._fail(problem, lost=True)
        elif self._life.now.state == "training":
            self._give_up_generation()
        elif self._life.now.state == "recovering":
            self._life.recovering(self._recoveries.cause)  # a death says more than what others saw of it
        elif not self._life.running:
            self._fail(message, lost=True)
        self._keep_standing()

    def _fail(self, message: str, *, exit_code: int = 1, lost: bool = False, symptom: bool = False) -> None:
        if self._life.fail(message, exit_code=exit_code, lost=lost, symptom=symptom):
            self._finished()

    def _finished(self, facts: Record | None = None) -> None:
        """`facts`: what the summary says where no worker could make one."""
        job, summary = self._life.now, self._chronicle.summary or facts
        if self._recoveries.done:
            summary = {**(summary or {}), "recoveries": self._recoveries.done}
        if self._chronicle.warnings:
            summary = {**(summary or {}), "warnings": self._chronicle.warnings}
        self._keep(lambda: self._sink.finished(job.state, job.message, summary))
        self._changed.notify_all()

    def _keep_standing(self) -> None:
        standing = Standing(
            job=self.job,
            origin=self._origin,
            state=self._life.now,
            formation=self._formation,
            seats=tuple(self._members.seats()),
            recoveries=self._recoveries,
            summary=self._chronicle.summary,
            warnings=tuple(self._chronicle.warnings),
        )
        if not self._life.now.over:
            self._keep(lambda: self._sink.standing(standing.to_record()))

    def _keep(self, write: Callable[[], None]) -> None:
        """Writes to the sink; one that cannot keep records (disk full) fails the job, not a member's call."""
        try:
            write()
        except OSError as error:
            text = f"the run folder cannot be written: {error}"
            if self._life.fail(text):
                self._changed.notify_all()
