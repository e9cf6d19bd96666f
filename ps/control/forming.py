"""How members form a generation: who must join, what they agree on, where it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardkeep.base.errors import ConfigError, JobError, ShardkeepError
from shardkeep.base.local_time import time_of_day
from shardkeep.ps.control.ending import Ending
from shardkeep.ps.control.job import Job, JobSpec
from shardkeep.ps.control.membership import SILENT_S, Seat
from shardkeep.ps.control.persisted_state import PersistedState
from shardkeep.ps.control.records import Formation, Offer, Record, ResumeRange, Shared
from shardkeep.ps.control.recoveries import meanwhile, sentence
from shardkeep.ps.control.recovery import Recovery
from shardkeep.ps.control.resume_step import Start, agreed_start, last_saved
from shardkeep.ps.control.same_tables import agreed_data, agreed_tables

TAKEOVER_VERSIONS = 1_000_000
"""Added to the version of the job's state by a coordinator that takes over: members have seen none so high."""
LOAD_S = 1800.0
"""Seconds more for members that have registered and load a checkpoint and a journal."""

OpenStore = Callable[[int], tuple[str, int]]


class Forming:
    """Forms generations. Call it within a transaction.

    Args:
        job: What it changes.
        ending: Ends a job whose members cannot agree or do not join.
        recovery: Ends the generation that a joining member has lost.
        open_store: Opens the TCPStore of a generation; returns host and port.
        spec: The job: how long members may take, where checkpoints may go.
    """

    def __init__(self, job: Job, ending: Ending, recovery: Recovery, open_store: OpenStore, spec: JobSpec) -> None:
        self._job = job
        self._ending = ending
        self._recovery = recovery
        self._open_store = open_store
        self._limit_s, self._shared = spec.form_timeout_s, spec.shared
        self._checkpoints: str | None = None
        """The folder of checkpoints: decided when all members have joined for the first time."""
        self._handed_down: Formation | None = None
        """The generation of a coordinator that died."""

    def take_over(self, state: PersistedState) -> None:
        """Continues where another coordinator died. Members notice only that nobody answered for a while."""
        job = self._job
        job.restore(replace(state, state=replace(state.state, version=state.state.version + TAKEOVER_VERSIONS)))
        record = job.recoveries.outlived(state.state.generation, time=time_of_day())
        self._tell_recovery(record, meanwhile(state.state))
        self._handed_down = formation = job.formation
        if formation is not None:
            self._checkpoints = formation.checkpoints
            job.events.formed(formation, f"took over generation {formation.generation}")

    def join(self, seat: Seat, offer: Offer, after: int, why: str) -> None:
        """Takes note that a member is ready, and why it lost the generation `after`; forms if it was the last."""
        job = self._job
        if self._handed_down is not None and self.formed_after(after) is self._handed_down:
            # the store of this generation died with its coordinator
            self._recovery.end_generation(f"the coordinator was restarted while {seat.member} was joining")
        if after and after == job.members.generation and job.life.now.state == "training":
            self._recovery.end_generation(f"{seat.member} lost the others: {why}")
        if self.formed_after(after) is None:
            seat.join(offer)
            self._form_if_complete()

    @property
    def limit_s(self) -> float:
        """Seconds that members may take. More if every member is there and a replacement may be loading."""
        job = self._job
        loads = job.life.now.state == "recovering" and not job.members.vacant()
        return self._limit_s + (LOAD_S if loads else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds until the job fails; 0 if no generation forms. A silent member counts as dead, not as loading."""
        job = self._job
        now = job.clock()
        silent = any(now - seat.last_seen > SILENT_S for seat in job.members.present() if not seat.joined)
        limit_s = self._limit_s if silent else self.limit_s
        return max(0.0, limit_s - (now - job.life.since)) if job.life.forms else 0.0

    def fail_if_late(self) -> None:
        """Fails the job if members did not join in time."""
        job = self._job
        if job.life.forms and job.clock() - job.life.since > self.limit_s:
            cause = f"{job.recoveries.cause}; " if job.life.now.state == "recovering" else ""
            limit = f"{self._limit_s:g} s (form_timeout_s)"
            missing = ", ".join(job.members.missing())
            self._ending.fail(f"{cause}the job did not form within {limit}; missing: {missing}")

    def formed_after(self, generation: int) -> Formation | None:
        """Returns the running generation if it is later than `generation`."""
        job = self._job
        waits = job.formation is None or job.formation.generation <= generation or not job.life.running
        return None if waits or job.life.now.state == "recovering" else job.formation

    def _form_if_complete(self) -> None:
        """Forms a generation once every member has joined."""
        job = self._job
        again = job.life.now.state == "recovering"
        if not job.life.forms or job.members.missing():
            return
        try:
            job.formation = formation = self._new_formation(again)
        except ShardkeepError as error:
            self._ending.fail(str(error), exit_code=error.exit_code)
        except (OSError, RuntimeError) as error:
            self._ending.fail(f"the generation cannot be opened: {error}")
        else:
            job.life.formed(formation.generation)
            job.events.formed(formation, f"generation {formation.generation} formed")
            if again:
                start, seconds = Start(formation.start_step, formation.source), job.clock() - job.life.since
                record = job.recoveries.over(formation.generation, start, seconds, time=time_of_day())
                self._tell_recovery(record, sentence(record))
            job.recoveries.clear()

    def _tell_recovery(self, record: Record, text: str) -> None:
        self._job.events.tell("recovery", {**record, "text": text})

    def _new_formation(self, again: bool) -> Formation:
        job = self._job
        servers, workers = (
            {s.member.index: s.offer.resume_range for s in job.members.seats(role)} for role in ("server", "worker")
        )
        start = self._start_again(servers, workers) if again else Start(job.recoveries.saved_step)
        if not again and self._shared is not None and self._checkpoints is None:
            self._decide_checkpoints(self._shared)
        seats = job.members.seats("worker")
        tables = agreed_tables([(seat.member, seat.offer.tables) for seat in seats])
        data, remarks = agreed_data([(seat.member, seat.offer.data) for seat in seats], job.formation)
        members = tuple(seat.member for seat in job.members.present())
        generation = job.members.generation + 1
        host, port = self._open_store(generation)
        where = (start.step, start.source, start.lacking, job.origin)
        formation = Formation(generation, host, port, members, tables, *where, data, self._checkpoints)
        job.write_members(formation)
        job.members.generation = generation
        if remarks:
            job.events.tell("data", {"text": "; ".join(remarks)})
        return formation

    def _start_again(self, servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]) -> Start:
        """Returns where a generation after another one starts. Raises JobError if too many steps would be lost."""
        job = self._job
        ranges = [*servers.values(), *workers.values()]
        reported = job.recoveries.saved_step
        job.recoveries.saved_step = saved = last_saved(reported, ranges)
        if saved < reported:
            job.events.warn(f"the checkpoint of step {reported} is missing")
        start = agreed_start(servers, workers) or Start(saved)
        if (refusal := job.recoveries.refusal(start, servers, workers)) is not None:
            raise JobError(refusal)
        return start

    def _decide_checkpoints(self, shared: Shared) -> None:
        """Decides whether checkpoints go to the shared folder. Raises ConfigError if they must and cannot."""
        job = self._job
        unseen = [f"{seat.member.name}: {seat.offer.unseen}" for seat in job.members.present() if seat.offer.unseen]
        self._checkpoints = "" if unseen else shared.folder
        if not unseen:
            job.events.note(f"checkpoints go to {shared.folder}, which all members see")
            return
        why = f"not all members can use {shared.folder} ({unseen[0]})"
        if shared.needed_by:
            raise ConfigError(f"{shared.needed_by}: {why}; set checkpoint.dir to a folder that all members share")
        job.recoveries.losses.period = 0
        job.events.warn(f"no checkpoints are kept: {why}; set checkpoint.dir to a folder that all members share")
