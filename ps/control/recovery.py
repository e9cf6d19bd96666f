"""Recoveries: the decision of a recovery, and the deaths and recoveries of a job. Pure logic: no clock, no sockets.

`plan_recovery` says where the next generation begins, what is lost by it, and whether that is too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardkeep.ps.control.records import ANY_STEP, JobState, Member, Record, ResumeRange

SHORTEST_PERIOD = 100
"""Steps: the least that `every_steps: auto` comes to, before it is worked out."""
_COSTS = "may cost the steps since the last checkpoint"
JOURNALS: Mapping[str, str] = {
    "fsync": f"fsync: a lost machine costs no acknowledged push, if its storage survives; that of all workers {_COSTS}",
    "os": f"os: a lost machine {_COSTS}",
    "off": f"off: a lost server {_COSTS}",
}
"""What the servers' journals survive, for people."""


@dataclass(slots=True)
class Losses:
    """Counts what a recovery would lose, and refuses too much of it.

    `most`: `recovery.max_lost_steps`; None = one checkpoint period, and the steps that the job trains while the
    checkpoint that ends it is written."""

    most: int | None = ANY_STEP
    period: int | None = None
    """Steps between two checkpoints; 0 = there are none, None = not worked out yet."""
    failed: bool = False
    """Whether the last checkpoint could not be written."""
    journal: str = ""
    """`recovery.journal`; "" = there are no journals."""

    @property
    def limit(self) -> int:
        """Steps that a recovery may lose."""
        if self.most is not None:
            return self.most
        if self.period is None:
            return SHORTEST_PERIOD
        return self.period if self.failed else 2 * self.period

    def take_checkpoint(self, record: Record) -> None:
        """Takes worker 0's record of a checkpoint: written, failed, or the number of steps between two."""
        if "every_steps" in record:
            self.period = int(record["every_steps"])
        else:
            self.failed = "bytes" not in record

    def at_risk(self, journal: str, saved: int) -> str:
        """What a lost machine may cost, by what journals survive. `saved`: step of the last checkpoint; 0 = none."""
        text = JOURNALS[journal]
        if self.limit >= ANY_STEP:
            return f"{text} (client.checkpoint), or all without one"
        if self.period:
            text += f", at most {self.period}, and those trained while one is written"
        elif self.period is None:
            text += "" if saved else ", or all before the first one"
        else:
            text += f" of step {saved}, as no other is kept" if saved else ", or all, as none is kept"
        known = self.most is not None or self.period is not None
        return text + (f"; above {self.limit} steps the job ends (recovery.max_lost_steps)" if known else "")

    def refusal(self, lost: int, *, how: str, whys: Iterable[str], cause: str) -> str | None:
        """Why a job that would lose so many steps, in this way, ends instead; None = it may continue."""
        if lost <= self.limit:
            return None
        allowed = f"recovery.max_lost_steps allows {self.limit}"
        if self.most is None and self.period is not None:
            allowed += ", of one checkpoint period" if self.period else ", as no checkpoints are kept"
        reasons = "".join(f"{why}; " for why in dict.fromkeys([cause, *whys]) if why)
        return f"{reasons}{lost} steps would be lost by {how}; {allowed}"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a generation begins; the fields as in Formation."""

    step: int
    source: int = -1
    lacking: tuple[int, ...] = ()


def agreed_start(servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]) -> ResumePoint | None:
    """The last step from which all servers can resume and some worker has the tower; None = there is none.

    Workers without the tower take it from that worker, unless each has a part: then all must hold the step. The
    servers' ranges ensure that no push is missing."""
    holders = {rank: one for rank, one in workers.items() if one.holds}
    first = max((one.first for one in servers.values()), default=0)
    last = min((one.last for one in servers.values()), default=ANY_STEP)
    step = max((min(last, one.last) for one in holders.values() if one.first <= last), default=-1)
    if step < first:
        return None
    having = [rank for rank, one in holders.items() if one.first <= step <= one.last]
    if len(having) < len(workers) and any(one.part for one in holders.values()):
        return None
    return ResumePoint(step, min(having), tuple(sorted(workers.keys() - set(having))))


def short_servers(servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]) -> dict[int, ResumeRange]:
    """The servers that lack updates which the others no longer hold."""
    holders = [one.first for one in workers.values() if one.holds]
    needed = max([*(one.first for one in servers.values()), min(holders, default=0)])
    return {index: one for index, one in servers.items() if one.last < needed}


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Where the next generation begins. `saved`: the step of the last checkpoint that members see. `reached`: the last
    step that was trained, as members know it. `refusal`: why the job ends in place of beginning there. `short`: the
    servers that lack updates, which they lose if the generation does not begin from the checkpoint. `whys`: of these,
    by role and index, and of workers without the tower, if nobody has it."""

    start: ResumePoint
    saved: int
    reached: int
    refusal: str | None
    short: Mapping[int, ResumeRange] = field(default_factory=dict)
    whys: Mapping[tuple[str, int], str] = field(default_factory=dict)


def plan_recovery(
    servers: Mapping[int, ResumeRange],
    workers: Mapping[int, ResumeRange],
    *,
    saved: int,
    reached: int,
    losses: Losses,
    cause: str,
) -> RecoveryPlan:
    """The plan for members that can resume so, by index. `saved`, `reached`: steps that workers reported.

    A server that lacks updates follows the others, if it can; else all go back to the last checkpoint."""
    seen = (one.saved for one in [*servers.values(), *workers.values()] if one.saved >= 0)
    saved = max(seen, default=saved)  # somebody may have deleted it since; where nobody looks, as reported
    start, short = agreed_start(servers, workers), {}
    holders = [one for one in workers.values() if one.holds]
    if start is None:
        short = short_servers(servers, workers)
        if all(one.lost_from is not None for one in short.values()):
            last = min((one.last for one in holders), default=0)
            start = agreed_start({**servers, **{i: replace(one, last=last) for i, one in short.items()}}, workers)
    whys = {("server", index): why_short(index, one) for index, one in short.items()}
    whys |= {} if holders else {("worker", rank): one.why for rank, one in workers.items() if one.why}
    if start is None:
        start = ResumePoint(saved)
        lost = max([reached, *(one.last for one in holders)]) - saved
        how = f"going back to {f'the checkpoint of step {saved}' if saved else 'step 0, as no checkpoint is there'}"
        reached = max([reached, *(one.last for one in servers.values() if one.holds)])
    else:
        step = min((one.last for one in short.values()), default=start.step)
        lost, how = start.step - step, f"following the others from step {step}"
    refusal = losses.refusal(lost, how=how, whys=whys.values(), cause=cause)
    return RecoveryPlan(start, saved, reached, refusal, short, whys)


def why_short(index: int, server: ResumeRange) -> str:
    """Why a server lacks updates."""
    if server.why or not server.file:
        return server.why
    return f"the journal of server {index} ends at byte {server.byte} of {server.file}"


RESTARTED = "the coordinator was restarted"
MOST_LOSSES = 3
"""A group may be lost so many times for each death that one member may have: a death can break more than one."""


@dataclass
class Recoveries:
    """The deaths and recoveries of a job.

    `restarts`: deaths of one member in a row, without one more trained step, that the job outlives.
    `saved_step`: of the last checkpoint; 0 = the job would begin again."""

    restarts: int
    saved_step: int
    furthest: int = -1
    """The last step that any worker reported."""
    reached: int = -1
    """The same, since the job last went back to a checkpoint."""
    done: tuple[Record, ...] = ()
    """For the summary: when, why, who died, the generation and step at which training resumed, seconds without a group,
    what was lost."""
    died: tuple[Record, ...] = ()
    """Since the last formation, in order: role, index, cause, and the step since which a server's updates are lost."""
    symptoms: tuple[str, ...] = ()
    """Since the last formation: how members lost the others."""
    unsent_rows: int = 0
    """Rows of gradient, or of its rounding errors, that members had not sent when they died since the last formation.
    """
    losses: Losses = field(default_factory=Losses)
    _deaths: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _losses: tuple[int, int] = (0, -2)

    @property
    def on(self) -> bool:
        return self.restarts > 0

    @property
    def cause(self) -> str:
        """The cause of the running recovery: the last death, or else a symptom that others reported."""
        return str(self.died[-1]["cause"]) if self.died else self.symptoms[0] if self.symptoms else ""

    @property
    def without_step(self) -> list[Record]:
        """The records of coordinator restarts after which no worker has reported its step yet."""
        return [record for record in self.done if record["step"] is None]

    def trained(self, step: int) -> bool:
        """A worker reports another step than before; whether a record was waiting for that."""
        self.furthest, self.reached = max(self.furthest, step), max(self.reached, step)
        waiting = self.without_step
        for record in waiting:
            record["step"] = step
        return bool(waiting)

    def take_report(self, kind: str, record: Record) -> bool:
        """Takes a checkpoint from a member's report. Returns whether there was one."""
        if kind == "phase" and record.get("phase") == "checkpoint":
            self.losses.take_checkpoint(record)
            if "bytes" in record:
                self.saved_step = int(record["step"])
            return True
        return False

    def count_death(self, member: Member, how: str, unsent_rows: int = 0, reason: str = "") -> str | None:
        """Counts a death, and the rows of gradient that died with it; why the job must end, or None."""
        if not self.on:
            return how
        count, step = self._deaths.get((member.role, member.index), (0, -2))
        count = count + 1 if self.furthest <= step else 1
        self._deaths[member.role, member.index] = count, self.furthest
        self.died = (*self.died, _death(member.role, member.index, how, reason))
        self.unsent_rows += unsent_rows
        if count > self.restarts:
            return f"{how}; it died {count} times without one more trained step (recovery.restarts: {self.restarts})"
        return None

    def seen(self, symptom: str) -> str | None:
        """Counts a group that was lost while nobody's death is known yet; why the job must end, or None."""
        self.symptoms = (*self.symptoms, symptom)
        count, step = self._losses
        self._losses = (count + 1 if self.furthest <= step else 1), self.furthest
        if self._losses[0] > MOST_LOSSES * self.restarts:
            return f"{symptom}; the group was lost {self._losses[0]} times without one more trained step"
        return None

    def record_recovery(self, generation: int, start: ResumePoint, seconds: float, *, time: str) -> Record:
        """Records that a generation has formed again, at the time of day `time`. Returns the record."""
        went_back, alone = start.source < 0, max([0, *(int(death["lost_steps"]) for death in self.died)])
        lost = {
            "went_back": went_back,
            "lost_steps": max(0, self.reached - start.step) if went_back else alone,
            "lost_unsent_rows": 0 if went_back else self.unsent_rows,
        }
        if went_back:
            self.reached = start.step
        where = {"generation": generation, "step": start.step, "seconds": round(seconds, 3)}
        return self._add({"time": time, "cause": self.cause, "died": list(self.died), **where, **lost})

    def record_restart(self, generation: int, *, time: str) -> Record:
        """Records a restart of the coordinator. Returns the record; its step is the next that a worker reports."""
        died = [_death("coordinator", 0, RESTARTED)]
        where = {"generation": generation, "step": None, "seconds": 0.0}
        lost = {"went_back": False, "lost_steps": 0, "lost_unsent_rows": 0}
        return self._add({"time": time, "cause": RESTARTED, "died": died, **where, **lost})

    def _add(self, record: Record) -> Record:
        self.done = (*self.done, record)
        return record

    def clear(self) -> None:
        """Forgets the deaths before a generation that has formed."""
        self.died, self.symptoms, self.unsent_rows = (), (), 0

    def take_plan(self, plan: RecoveryPlan) -> None:
        """Takes what the next generation loses."""
        self.saved_step, self.reached, follows = plan.saved, plan.reached, plan.start.source >= 0
        dead = {(death["role"], death["index"]): death for death in self.died}
        for place, death in dead.items():  # who died more than once has its losses in its last death
            server = plan.short.get(place[1]) if place[0] == "server" else None
            lost_from = None if server is None or not follows else server.last
            death["lost_from"] = lost_from
            death["lost_steps"] = 0 if lost_from is None else plan.start.step - lost_from
            death |= {"why": plan.whys[place]} if place in plan.whys else {}
            death |= {"file": server.file, "byte": server.byte} if server is not None and server.file else {}


def sentence(record: Record) -> str:
    """A recovery in words: why, where training resumed, what is lost."""
    where = " from the members' own state"
    if record["went_back"]:
        where = " from the last checkpoint" if record["step"] else " from the beginning"
    others = dict.fromkeys(f"{death['role']} {death['index']}" for death in record["died"][:-1])
    also = f"; so did {', '.join(others)} before" if others else ""
    text = f"{record['cause']}{also}; training resumes at step {record['step']}{where}, after {record['seconds']:.1f} s"
    if record["went_back"]:
        whys = "; ".join(death["why"] for death in record["died"] if death.get("why"))
        text += f"; {record['lost_steps']:,} steps are lost{whys and f': {whys}'}" if record["lost_steps"] else ""
    for death in record["died"]:
        if death["lost_from"] is not None:
            since = f"since step {death['lost_from']} ({death['lost_steps']:,} steps)"
            text += f"; server {death['index']} lost its updates {since}: {death['why']}"
    if record["lost_unsent_rows"]:
        text += f"; unsent gradient of {record['lost_unsent_rows']:,} rows is lost"
    return text


def restart_sentence(job: JobState) -> str:
    """A restart of the coordinator in words; `job`: the state in which it found the job."""
    if job.state == "training":
        return f"{RESTARTED}; training resumed meanwhile"
    return f"{RESTARTED} while the job was {job.state}" + (f": {job.message}" if job.message else "")


def _death(role: str, index: int, cause: str, reason: str = "") -> Record:
    lost = {"lost_from": None, "lost_steps": 0}
    return {"role": role, "index": index, "cause": cause, **({"reason": reason} if reason else {}), **lost}
