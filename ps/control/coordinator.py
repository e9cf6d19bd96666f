"""The coordinator: admits members, forms generations, watches leases, ends the job.

No sockets and no threads of its own: the servicer calls it from many threads, a ticker calls `tick`. Each call is one
transaction on the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from shardkeep.base.machine.limits import Limit
from shardkeep.ps.control.agreement import own_versions
from shardkeep.ps.control.departures import Departures
from shardkeep.ps.control.forming import Arrivals, Forming, OpenStore
from shardkeep.ps.control.job import CoordinatedJob, JobSpec, PersistedState
from shardkeep.ps.control.records import (
    NOTHING_KEPT,
    Formation,
    Hello,
    JobSink,
    JobState,
    JobStatus,
    Offer,
    Record,
    RecoveryFolder,
    Registration,
)
from shardkeep.ps.control.telemetry import process_figures

DOUBT_POLL_S = 0.2
"""How often a newcomer looks whether the member before it is alive."""


class Coordinator:
    """Coordinates one job.

    Args:
        spec: The job.
        open_store: Opens (or returns) the TCPStore for a generation; returns host and port.
        close_store: Closes the store of a generation that ends.
        sink: Keeps the records.
        clock: Returns seconds, monotonic.
        before: The persisted state of a coordinator of this job that died. Raises UserError if it cannot be read.
        versions: The versions that members must have; None = those of this process.
        quota: The CPU quota of this process.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        open_store: OpenStore,
        close_store: Callable[[], None] = lambda: None,
        sink: JobSink,
        clock: Callable[[], float] = time.monotonic,
        before: Record | None = None,
        versions: Mapping[str, str] | None = None,
        quota: Limit | None = None,
    ) -> None:
        self.spec, self._quota = spec, Limit("cpu") if quota is None else quota
        self._job = CoordinatedJob(spec, sink, clock)
        self._departures = Departures(self._job, close_store)
        self._arrivals = Arrivals(self._job, self._departures, own_versions() if versions is None else versions)
        self._forming = Forming(self._job, self._departures, open_store, spec)
        self._last_tick = clock()
        if before is not None:
            with self._job.transaction():
                self._forming.take_over(PersistedState.from_record(before))
        self.id = self._job.id
        """The job's random name."""

    @property
    def state(self) -> JobState:
        return self._job.kept

    def register(self, hello: Hello) -> Registration:
        """Admits a member. A repeated Hello is welcome.

        Blocks for some seconds where another member has the seat and has been silent since.

        Raises ProtocolError (versions), ConfigError (no such seat), UserError (seat taken), JobError (late).
        """
        job, came = self._job, self._job.clock()
        with job.transaction() as scope:
            for _ in range(round(self.spec.deadlines.doubt_s / DOUBT_POLL_S)):
                if job.wait_for(lambda: not self._arrivals.in_doubt(hello, came), DOUBT_POLL_S):
                    break
            scope.save = not job.members.known(hello.token)
            seat = self._arrivals.admit(hello)
            if scope.save:
                job.life.came = job.clock()
            formation = job.formation
            spec, lease_s = self.spec, self.spec.deadlines.lease_s
            shared = spec.shared if formation is None else None
            return Registration(spec.config_yaml, lease_s, job.id, formation, seat.kept, shared, spec.run_dir)

    def join(
        self,
        token: str,
        offer: Offer,
        *,
        after: int = 0,
        why: str = "",
        kept: RecoveryFolder = NOTHING_KEPT,
        wait_s: float = 0.0,
    ) -> tuple[JobState, Formation | None]:
        """Takes note that a member is ready. Blocks up to `wait_s` seconds until the group is formed.

        Args:
            token: Names the member.
            offer: What the member brings.
            after: The generation that the member has lost; 0 = it was in none.
            why: How it lost it.
            kept: Where it keeps what its replacement needs; nothing = as it said before.
            wait_s: Seconds to wait.

        Returns: The job's state and the formation; None = look at the state and call again.
        """
        job, forming = self._job, self._forming
        with job.transaction() as scope:
            seat = self._arrivals.touch(token)
            seat.kept = kept if kept.folder else seat.kept
            done = job.events.summary is not None  # every step is trained
            if done:
                self._departures.let_go(seat)
                scope.save = True
            else:
                forming.join(seat, offer, after, why)
        with job.locked():
            job.wait_for(lambda: (not done and forming.formed_after(after) is not None) or not job.waits, wait_s)
            formation = None if done else forming.formed_after(after)
        return job.kept, formation

    def heartbeat(
        self, token: str, *, step: int = -1, phase: str = "", unsent_rows: int = 0, seen: int = 0, wait_s: float = 0.0
    ) -> JobState:
        """Renews the lease. Blocks up to `wait_s` seconds while the version of the job's state is `seen`."""
        job = self._job
        with job.transaction() as scope:
            seat = self._arrivals.touch(token)
            if phase != seat.phase:
                self._departures.moved(seat)
            seat.phase, seat.unsent_rows = phase, unsent_rows
            if step not in (-1, seat.step):  # an equal step may be from before the job rewound
                seat.step = step
                scope.save = seat.member.role == "worker" and job.recoveries.trained(step)
        with job.locked():
            job.wait_for(lambda: job.life.now.version != seen or job.closed, wait_s)
        return replace(job.kept, moves=self._departures.moves)

    def meet(self, token: str, point: int, *, wait_s: float = 0.0) -> tuple[JobState, tuple[int, ...]]:
        """Takes note that a worker has come to a point, and blocks up to `wait_s` seconds until all have.

        Returns: The job's state, and the indices of the workers that have not come so far. Points grow; they outlive
        generations and this process."""
        job = self._job
        with job.transaction() as scope:
            seat = self._arrivals.touch(token)
            if point > seat.met:
                seat.met = point
                scope.save, scope.wake = True, not self._awaited(point)
        with job.locked():
            job.wait_for(lambda: not self._awaited(point) or not job.waits, wait_s)
            awaited = self._awaited(point)
        return job.kept, awaited

    def _awaited(self, point: int) -> tuple[int, ...]:
        workers = {seat.member.index: seat.met for seat in self._job.members.seats("worker") if not seat.lost}
        return tuple(index for index in range(self.spec.num_workers) if workers.get(index, -1) < point)

    def report(self, token: str, *, sequence: int, kind: str, record: Record) -> JobState:
        """Takes one record. Ignores a record that was sent again. Raises ProtocolError."""
        job = self._job
        with job.transaction() as scope:
            seat = self._arrivals.touch(token)
            if sequence > seat.last_sequence:
                seat.last_sequence = sequence
                job.events.report(seat.member, kind, record)
                scope.save = job.recoveries.take_report(kind, record) or kind == "summary"
        return job.kept

    def leave(
        self, token: str, *, code: int, message: str = "", symptom: bool = False, refused: bool = False
    ) -> JobState:
        """Takes note that a member ends with exit code `code`. `symptom`: the message is about another's failure.
        `refused`: the process cannot take its seat, and the job waits for another.

        A member that leaves on a signal is lost as if it had died, but nobody needs to end it."""
        with self._job.transaction() as scope:
            scope.save = True
            self._departures.leave(self._arrivals.touch(token), code, message, symptom=symptom, refused=refused)
        return self._job.kept

    def lost(self, role: str, index: int, *, pid: int = 0, reason: str, final: bool = False) -> JobState:
        """Takes note that a launcher saw a member's process end; `pid` 0 = any. Ignores a member that left or was lost
        before. `final`: the launcher starts no other, so the job fails if nobody has the seat."""
        job, text = self._job, f"{role} {index} ended: {reason}"
        with job.transaction() as scope:
            job.members.check_seat(role, index)
            seat = job.members.at(role, index)
            if seat is None:
                text, final = f"{role} {index} ended before it registered: {reason}", final or not job.recoveries.on
                job.events.note(text, phase="lost")
            elif not seat.gone and pid in (0, seat.member.pid):
                scope.save, text = True, f"{seat.member} ended: {reason}, {self._departures.last_step(seat)}"
                self._departures.lose(seat, text, reason=reason)
            if final and (seat is None or seat.lost):
                self._departures.give_up(text)
        return job.kept

    def stop(self, reason: str, *, limit_s: float | None = None) -> JobState:
        """Ends the job in order: workers finish their step, perhaps one more, and leave.

        `limit_s`: seconds until the job is over in any case; a later call can only shorten them. None = SILENCE_S
        without a row of the last checkpoint."""
        with self._job.transaction():
            self._departures.stop(reason, limit_s)
        return self._job.kept

    def status(self, *, wait_s: float = 0.0) -> JobStatus:
        """Blocks up to `wait_s` seconds until the job is over."""
        job = self._job
        self.wait_over(wait_s)
        with job.locked():
            state, events, now = job.kept, job.events, job.clock()
            return JobStatus(
                state=state.state,
                message=state.message,
                exit_code=state.exit_code,
                generation=state.generation,
                members=tuple(seat.status(now) for seat in job.members.seats()),
                progress=events.progress,
                evaluation=events.evaluation,
                summary=events.summary,
                events=events.events,
                missing=tuple(job.members.missing()) if job.life.forms else (),
                left_s=self._forming.left_s,
                telemetry=events.telemetry,
            )

    def figures(self) -> Record:
        """What the coordinator's telemetry records say."""
        with self._job.locked():
            state, members = self._job.life.now, sum(1 for _ in self._job.members.present())
        record = {"generation": state.generation, "state": state.state, "members": members}
        return {**record, **process_figures(), "metrics": self.spec.metrics}

    def take_telemetry(self, record: Record) -> None:
        """Takes a telemetry record of the coordinator itself."""
        with self._job.transaction():
            self._job.events.take_telemetry("coordinator", 0, record)

    def tick(self) -> None:
        """Checks leases and deadlines. Call it several times per lease."""
        job, lease_s = self._job, self.spec.deadlines.lease_s
        self._quota.look()
        with job.transaction() as scope:
            now = job.clock()
            gap, self._last_tick = now - self._last_tick, now
            if gap > lease_s / 2:  # this process stood still (suspended, swapped out) and heard nobody
                job.members.forgive(gap)
                job.life.since += gap
                job.life.came += gap
            for seat in job.members.expired(now):
                scope.save = True
                silent = f"{seat.member} sent no heartbeat for {lease_s:g} s (lease_s)"
                slow = f"; {self._quota.text()}" if self._quota.recent else ""
                self._departures.lose(seat, f"{silent}, {self._departures.last_step(seat)}{slow}")
            for seat in job.members.stuck(now):
                scope.save = True
                self._departures.lose(seat, f"{seat.member} is stuck: {seat.phase}, none for {now - seat.moved:.0f} s")
            self._forming.fail_if_late()
            self._departures.stop_if_late()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Blocks until the job is over; False after `timeout_s` seconds."""
        job = self._job
        with job.locked():
            return job.wait_for(lambda: job.life.now.over or job.closed, timeout_s)

    def wait_drained(self, timeout_s: float) -> bool:
        """Blocks until every member has left or is lost; False after `timeout_s` seconds."""
        job = self._job
        with job.locked():
            return job.wait_for(lambda: not job.members.present() or job.closed, timeout_s)

    def save(self) -> None:
        """Saves the persisted state. Call it before members can know the address."""
        with self._job.transaction() as scope:
            scope.save = True

    def close(self) -> None:
        """Wakes all waiting calls, at the end of the process."""
        self._job.close()
