"""The coordinator: admits members, forms generations, watches leases, ends the job.

No sockets and no threads of its own: the servicer calls it from many threads, a ticker calls `tick`. Each call is one
transaction on the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shardkeep.ps.control.ending import STOP_PATIENCE_S, Ending
from shardkeep.ps.control.forming import Forming, OpenStore
from shardkeep.ps.control.job import Job, JobSpec
from shardkeep.ps.control.persisted_state import PersistedState
from shardkeep.ps.control.places import Places
from shardkeep.ps.control.records import (
    NOTHING_KEPT,
    Admission,
    Formation,
    Hello,
    JobSink,
    JobState,
    Kept,
    Offer,
    Record,
    Status,
)
from shardkeep.ps.control.recovery import Recovery
from shardkeep.ps.control.telemetry import process_figures
from shardkeep.ps.control.versions import own_versions

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
    ) -> None:
        self.spec = spec
        self._job = Job(spec, sink, clock)
        self._ending = Ending(self._job)
        self._recovery = Recovery(self._job, self._ending, close_store)
        self._places = Places(self._job, self._recovery, own_versions() if versions is None else versions)
        self._forming = Forming(self._job, self._ending, self._recovery, open_store, spec)
        self._last_tick = clock()
        if before is not None:
            with self._job.transaction():
                self._forming.take_over(PersistedState.from_record(before, self._last_tick))
        self.id = self._job.id
        """The job's random name."""

    @property
    def state(self) -> JobState:
        return self._job.life.now

    def register(self, hello: Hello) -> Admission:
        """Admits a member. A repeated Hello is welcome.

        Blocks for some seconds where another member has the place and has been silent since.

        Raises ProtocolError (versions), ConfigError (no such place), UserError (place taken), JobError (late).
        """
        job, came = self._job, self._job.clock()
        with job.locked():
            for _ in range(round(self.spec.doubt_s / DOUBT_POLL_S)):
                if job.wait_for(lambda: not self._places.in_doubt(hello, came), DOUBT_POLL_S):
                    break
        with self._job.transaction() as scope:
            scope.save = not self._job.members.known(hello.token)
            seat = self._places.admit(hello)
            formation = self._job.formation
            shared = self.spec.shared if formation is None else None
            return Admission(self.spec.config_yaml, self.spec.lease_s, formation, seat.kept, shared, self.spec.run_dir)

    def join(
        self, token: str, offer: Offer, *, after: int = 0, why: str = "", kept: Kept = NOTHING_KEPT, wait_s: float = 0.0
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
            seat = self._places.touch(token)
            seat.kept = kept if kept.folder else seat.kept
            done = job.events.summary is not None  # every step is trained
            if done:
                self._recovery.let_go(seat)
                scope.save = True
            else:
                forming.join(seat, offer, after, why)
        with job.locked():
            job.wait_for(lambda: (not done and forming.formed_after(after) is not None) or not job.waits, wait_s)
            return job.life.now, None if done else forming.formed_after(after)

    def heartbeat(
        self, token: str, *, step: int = -1, phase: str = "", unsent_rows: int = 0, seen: int = 0, wait_s: float = 0.0
    ) -> JobState:
        """Renews the lease. Blocks up to `wait_s` seconds while the version of the job's state is `seen`."""
        job = self._job
        with job.transaction() as scope:
            seat = self._places.touch(token)
            seat.phase, seat.unsent_rows = phase, unsent_rows
            if step not in (-1, seat.step):  # an equal step may be from before the job rewound
                seat.step = step
                scope.save = seat.member.role == "worker" and job.recoveries.trained(step)
        with job.locked():
            job.wait_for(lambda: job.life.now.version != seen or job.closed, wait_s)
            return job.life.now

    def meet(self, token: str, point: int, *, wait_s: float = 0.0) -> tuple[JobState, tuple[int, ...]]:
        """Takes note that a worker has come to a point, and blocks up to `wait_s` seconds until all have.

        Returns: The job's state, and the indices of the workers that have not come so far. Points grow; they outlive
        generations and this process."""
        job = self._job
        with job.transaction() as scope:
            seat = self._places.touch(token)
            if point > seat.met:
                seat.met = point
                scope.save = True
        with job.locked():
            job.wait_for(lambda: not self._awaited(point) or not job.waits, wait_s)
            return job.life.now, self._awaited(point)

    def _awaited(self, point: int) -> tuple[int, ...]:
        workers = {seat.member.index: seat.met for seat in self._job.members.seats("worker") if not seat.lost}
        return tuple(index for index in range(self.spec.num_workers) if workers.get(index, -1) < point)

    def report(self, token: str, *, sequence: int, kind: str, record: Record) -> JobState:
        """Takes one record. Ignores a record that was sent again. Raises ProtocolError."""
        job = self._job
        with job.transaction() as scope:
            seat = self._places.touch(token)
            if sequence > seat.last_sequence:
                seat.last_sequence = sequence
                job.events.report(seat.member, kind, record)
                scope.save = job.recoveries.heard(seat.member, kind, record) or kind == "summary"
            return job.life.now

    def leave(
        self, token: str, *, code: int, message: str = "", symptom: bool = False, refused: bool = False
    ) -> JobState:
        """Takes note that a member ends with exit code `code`. `symptom`: the message is about another's failure.
        `refused`: the process cannot take its place, and the job waits for another.

        A member that leaves on a signal is lost as if it had died, but nobody needs to end it."""
        with self._job.transaction() as scope:
            scope.save = True
            self._recovery.leave(self._places.touch(token), code, message, symptom=symptom, refused=refused)
        return self._job.life.now

    def lost(self, role: str, index: int, *, pid: int = 0, reason: str) -> JobState:
        """Takes note that a launcher saw a member's process end; `pid` 0 = any. Ignores a member that left or was lost
        before."""
        job = self._job
        with job.transaction() as scope:
            job.members.check_place(role, index)
            seat = job.members.at(role, index)
            if seat is None:
                text = f"{role} {index} ended before it registered: {reason}"
                if job.recoveries.on:
                    job.events.note(text)
                else:
                    self._ending.fail(text, lost=True)
            elif not seat.gone and pid in (0, seat.member.pid):
                scope.save = True
                self._recovery.lose(seat, f"{seat.member} ended: {reason}, {self._recovery.last_step(seat)}")
        return job.life.now

    def stop(self, reason: str, *, limit_s: float = STOP_PATIENCE_S) -> JobState:
        """Ends the job in order: workers finish their step, perhaps one more, and leave.

        `limit_s`: seconds until the job is over in any case; a later call can only shorten them."""
        with self._job.transaction():
            self._ending.stop(reason, limit_s)
        return self._job.life.now

    def status(self, *, wait_s: float = 0.0) -> Status:
        """Blocks up to `wait_s` seconds until the job is over."""
        job = self._job
        self.wait_over(wait_s)
        with job.locked():
            state, events, now = job.life.now, job.events, job.clock()
            return Status(
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
        found = {"generation": state.generation, "state": state.state, "members": members}
        return {**found, **process_figures(), "metrics": self.spec.metrics}

    def take_telemetry(self, record: Record) -> None:
        """Takes a telemetry record of the coordinator itself."""
        with self._job.transaction():
            self._job.events.take_telemetry("coordinator", 0, record)

    def tick(self) -> None:
        """Checks leases and deadlines. Call it several times per lease."""
        job, lease_s = self._job, self.spec.lease_s
        with job.transaction() as scope:
            now = job.clock()
            gap, self._last_tick = now - self._last_tick, now
            if gap > lease_s / 2:  # this process stood still (suspended, swapped out) and heard nobody
                job.members.forgive(gap)
                job.life.since += gap
            for seat in job.members.expired(now):
                scope.save = True
                silent = f"sent no heartbeat for {lease_s:g} s (lease_s)"
                self._recovery.lose(seat, f"{seat.member} {silent}, {self._recovery.last_step(seat)}")
            self._forming.fail_if_late()
            self._ending.stop_if_late()

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
