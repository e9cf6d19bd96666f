"""How members come into the job and form a generation: who is admitted, who must join, where it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardkeep.base.deadlines import SILENCE_S
from shardkeep.base.errors import ConfigError, JobError, PlaceLost, ShardkeepError, Superseded
from shardkeep.base.logs.local_time import time_of_day
from shardkeep.ps.control.agreement import agreed_data, agreed_tables, check_settings, check_versions
from shardkeep.ps.control.departures import Departures
from shardkeep.ps.control.job import CoordinatedJob, JobSpec, PersistedState
from shardkeep.ps.control.membership import Seat, silent_s
from shardkeep.ps.control.records import Formation, Hello, Member, Offer, Record, ResumeRange, Shared
from shardkeep.ps.control.recovery import ResumePoint, plan_recovery, restart_sentence, sentence

TAKEOVER_VERSIONS = 1_000_000
"""Added to the version of the job's state by a coordinator that takes over: members have seen none so high."""

OpenStore = Callable[[int], tuple[str, int]]


class Arrivals:
    """Admits members. Call it within a transaction.

    Args:
        job: What it changes.
        departures: Declares the member dead that a newcomer replaces.
        versions: The versions that a member must have.
    """

    def __init__(self, job: CoordinatedJob, departures: Departures, versions: Mapping[str, str]) -> None:
        self._job = job
        self._departures = departures
        self._versions = versions

    def admit(self, hello: Hello) -> Seat:
        """Returns the seat of a member. A repeated Hello returns the same one.

        Raises ProtocolError (versions), ConfigError (no such seat), UserError (seat taken), JobError (late)."""
        job, member = self._job, hello.member
        check_versions(hello, self._versions)
        if not job.members.known(hello.token):
            job.members.check_seat(member.role, member.index)
            self._make_room(member)
            self._refuse_when_late(member)
            job.members.admit(member, hello.token, job.clock())
            job.events.note(f"{member} registered", phase="registered", member=member)
        return job.members.seat(hello.token)

    def touch(self, token: str) -> Seat:
        """Returns the seat of a member and renews its lease. Raises PlaceLost if the member has none any more."""
        seat = self._job.members.seat(token)
        if seat.lost and self._job.life.running:
            raise PlaceLost(f"{seat.member} was declared dead, and the job continued without it")
        seat.last_seen = self._job.clock()
        return seat

    def in_doubt(self, hello: Hello, since: float) -> bool:
        """Whether the member before a newcomer may be dead: it has been silent `since` the newcomer came, and not long
        enough to be sure."""
        job = self._job
        held = job.members.at(hello.member.role, hello.member.index)
        if held is None or held.gone or held.token == hello.token or not (job.recoveries.on and job.life.running):
            return False
        return held.last_seen <= since and job.clock() - held.last_seen <= self._silent_s

    @property
    def _silent_s(self) -> float:
        return min(silent_s(sum(self._job.members.counts.values())), self._job.members.lease_s)

    def _make_room(self, newcomer: Member) -> None:
        """Declares the member before `newcomer` dead before its lease ends: it is silent, and somebody started another
        process for its seat."""
        job, held = self._job, self._job.members.at(newcomer.role, newcomer.index)
        if held is None or held.gone or not job.recoveries.on or job.life.now.state not in ("training", "recovering"):
            return
        if (silent_s := job.clock() - held.last_seen) > self._silent_s:
            text = f"{held.member} died: no heartbeat for {silent_s:.0f} s, and another process took its place"
            self._departures.lose(held, text)

    def _refuse_when_late(self, member: Member) -> None:
        state = self._job.life.now
        if state.over or state.state == "stopping":
            why = f": {state.message}" if state.message else ""
            raise JobError(f"{member.name} comes too late: the job is {state.state}{why}")
        held = self._job.members.at(member.role, member.index)
        if held is not None and held.gone and not (self._job.recoveries.on and held.lost):
            raise JobError(f"{member.name} was in the job already ({held.member}) and cannot be replaced")


class Forming:
    """Forms generations. Call it within a transaction.

    Args:
        job: What it changes.
        departures: Ends the generation that a joining member has lost.
        open_store: Opens the TCPStore of a generation; returns host and port.
        spec: The job: how long members may take, where checkpoints may go, what journals survive.
    """

    def __init__(self, job: CoordinatedJob, departures: Departures, open_store: OpenStore, spec: JobSpec) -> None:
        self._job = job
        self._departures = departures
        self._open_store = open_store
        self._settings = spec.settings
        self._limit_s, self._replace_s, self._shared = spec.deadlines.form_s, spec.deadlines.replace_s, spec.shared
        self._silent_s = silent_s(spec.num_members)
        self._checkpoints: str | None = None
        """The folder of checkpoints: decided when all members have joined for the first time, as the next."""
        self._journal = spec.losses.journal
        self._inherited: Formation | None = None
        """The generation of a coordinator that died."""

    def take_over(self, state: PersistedState) -> None:
        """Continues where another coordinator died. Members notice only that nobody answered for a while."""
        job = self._job
        job.restore(replace(state, state=replace(state.state, version=state.state.version + TAKEOVER_VERSIONS)))
        record = job.recoveries.record_restart(state.state.generation, time=time_of_day())
        self._tell_recovery(record, restart_sentence(state.state))
        self._inherited = formation = job.formation
        if formation is not None:
            self._checkpoints, self._journal = formation.checkpoints, formation.journal
            job.events.formed(formation, f"took over generation {formation.generation}")

    def join(self, seat: Seat, offer: Offer, after: int, why: str) -> None:
        """Takes note that a member is ready, and why it lost the generation `after`; forms if it was the last. Raises
        UserError for a member with another config."""
        job = self._job
        if self._inherited is not None and self.formed_after(after) is self._inherited:
            # the store of this generation died with its coordinator
            self._departures.end_generation(f"the coordinator was restarted while {seat.member} was joining")
        if after and after == job.members.generation and job.life.now.state == "training":
            self._departures.end_generation(f"{seat.member} lost the others: {why}")
        if self.formed_after(after) is None:
            check_settings(seat.member, offer.settings, self._settings)
            seat.join(replace(offer, settings={}))  # known to be the coordinator's
            self._form_if_complete()

    def limit(self, *, vacant: bool) -> tuple[float, str]:
        """Seconds that members may take since the last one came, was lost or did rows, and the setting. More if every
        member is there and a replacement may be loading. `vacant`: a member must still be started."""
        if self._job.life.now.state != "recovering":
            return self._limit_s, "form_timeout_s"
        if vacant:
            return self._replace_s, "recovery.replace_timeout_s"
        return self._limit_s + SILENCE_S, "form_timeout_s"

    @property
    def left_s(self) -> float:
        """Seconds until the job fails; 0 if no generation forms. A silent member counts as dead, not as loading."""
        job = self._job
        now = job.clock()
        silent = any(now - seat.last_seen > self._silent_s for seat in job.members.present() if not seat.joined)
        limit_s, _ = self.limit(vacant=silent or job.members.vacant())
        return max(0.0, limit_s - (now - job.life.came)) if job.life.forms else 0.0

    def fail_if_late(self) -> None:
        """Fails the job if members did not join in time."""
        job = self._job
        if not job.life.forms:
            return
        limit_s, setting = self.limit(vacant=job.members.vacant())
        if job.clock() - job.life.came > limit_s:
            cause = f"{job.recoveries.cause}; " if job.life.now.state == "recovering" else ""
            limit = f"{limit_s:g} s ({setting})"
            missing = ", ".join(map(str, job.members.missing()))
            job.life.fail(f"{cause}the job did not form within {limit}; missing: {missing}")

    def formed_after(self, generation: int) -> Formation | None:
        """Returns the running generation if it is later than `generation`."""
        job = self._job
        waits = job.formation is None or job.formation.generation <= generation or not job.life.running
        return None if waits or job.life.now.state == "recovering" else job.formation

    def _form_if_complete(self) -> None:
        """Forms a generation once every member has joined."""
        job = self._job
        again = job.life.now.state == "recovering"
        if not job.life.forms or next(job.members.missing(), None):
            return
        try:
            job.formation = formation = self._new_formation(again)
        except Superseded:
            raise
        except ShardkeepError as error:
            job.life.fail(str(error), exit_code=error.exit_code)
        except (OSError, RuntimeError) as error:
            job.life.fail(f"the generation cannot be opened: {error}")
        else:
            job.life.formed(formation.generation)
            job.events.formed(formation, f"generation {formation.generation} formed")
            if again:
                start, seconds = ResumePoint(formation.start_step, formation.source), job.clock() - job.life.since
                record = job.recoveries.record_recovery(formation.generation, start, seconds, time=time_of_day())
                self._tell_recovery(record, sentence(record))
            job.recoveries.clear()

    def _tell_recovery(self, record: Record, text: str) -> None:
        self._job.events.tell("recovery", {**record, "text": text})

    def _new_formation(self, again: bool) -> Formation:
        job = self._job
        servers, workers = (
            {s.member.index: s.offer.resume_range for s in job.members.seats(role)} for role in ("server", "worker")
        )
        start = self._start_again(servers, workers) if again else ResumePoint(job.recoveries.saved_step)
        shared = self._shared
        if not again and shared is not None and not shared.proof_only and self._checkpoints is None:
            self._decide_checkpoints(shared)
        if not again and self._journal:
            self._decide_journal(start.step)
        seats = job.members.seats("worker")
        tables = agreed_tables([(seat.member, seat.offer.tables) for seat in seats])
        data, remarks = agreed_data([(seat.member, seat.offer.data) for seat in seats], job.formation)
        members = tuple(seat.member for seat in job.members.present())
        generation = job.members.generation + 1
        host, port = self._open_store(generation)
        where = (start.step, start.source, start.lacking, job.origin)
        formation = Formation(generation, host, port, members, tables, *where, data, self._checkpoints, self._journal)
        job.write_members(formation)
        job.members.generation = generation
        if remarks:
            job.events.tell("data", {"text": "; ".join(remarks)})
        return formation

    def _start_again(self, servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]) -> ResumePoint:
        """Returns where a generation after another one starts. Raises JobError if too many steps would be lost."""
        job, recoveries = self._job, self._job.recoveries
        reported = recoveries.saved_step
        plan = plan_recovery(
            servers,
            workers,
            saved=reported,
            reached=recoveries.reached,
            losses=recoveries.losses,
            cause=recoveries.cause,
        )
        recoveries.take_plan(plan)
        if plan.saved < reported:
            job.events.warn(f"the checkpoint of step {reported} is missing")
        if plan.refusal is not None:
            raise JobError(plan.refusal)
        return plan.start

    def _decide_journal(self, saved: int) -> None:
        """Decides, if the config does not, whether journals survive their machines: another host sees each folder."""
        members, unseen = list(self._job.members.present()), ""
        if self._journal == "auto" and len({seat.member.host for seat in members}) > 1:
            see = {seat.member.host for seat in members if seat.kept.shared or not seat.offer.unseen}
            for seat in self._job.members.seats("server"):
                if not (seat.kept.shared and see - {seat.member.host}):
                    unseen = f"{seat.kept.folder or 'the journal'} of {seat.member.name}"
            self._journal = "os" if unseen else "fsync"
        self._journal = "os" if self._journal == "auto" else self._journal
        text = self._job.recoveries.losses.at_risk(self._journal, saved)
        self._job.events.tell("journal", {"text": text + (unseen and f"; no other host is known to see {unseen}")})

    def _decide_checkpoints(self, shared: Shared) -> None:
        """Decides whether checkpoints go to the shared folder. Raises ConfigError if they must and cannot."""
        job = self._job
        unseen = [f"{seat.member.name}: {seat.offer.unseen}" for seat in job.members.present() if seat.offer.unseen]
        self._checkpoints = "" if unseen else shared.folder
        if not unseen:
            job.events.note(f"checkpoints go to {shared.folder}, which all members see", phase="checkpoints")
            return
        why = f"not all members can use {shared.folder} ({unseen[0]})"
        if shared.needed_by:
            raise ConfigError(f"{shared.needed_by}: {why}; set checkpoint.dir to a folder that all members share")
        job.recoveries.losses.period = 0
        job.events.warn(f"no checkpoints are kept: {why}; set checkpoint.dir to a folder that all members share")
