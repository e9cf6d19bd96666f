"""Recoveries: the deaths and recoveries of a job, and how often a member may die. Pure logic: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardkeep.ps.control.losses import Losses
from shardkeep.ps.control.records import JobState, Member, Record, ResumeRange
from shardkeep.ps.control.resume_step import Start

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
    done: list[Record] = field(default_factory=list)
    """For the summary: when, why, who died, the generation and step at which training resumed, seconds without a group,
    what was lost."""
    died: list[Record] = field(default_factory=list)
    """Since the last formation, in order: role, index, cause, and the step since which a server's updates are lost."""
    symptoms: list[str] = field(default_factory=list)
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
    def untold(self) -> list[Record]:
        """The records of coordinator restarts after which no worker has reported its step yet."""
        return [record for record in self.done if record["step"] is None]

    def trained(self, step: int) -> bool:
        """A worker reports another step than before; whether a record was waiting for that."""
        self.furthest, self.reached = max(self.furthest, step), max(self.reached, step)
        waiting = self.untold
        for record in waiting:
            record["step"] = step
        return bool(waiting)

    def heard(self, member: Member, kind: str, record: Record) -> bool:
        """Takes a checkpoint or lost updates from a member's report. Returns whether there was any."""
        if kind == "phase" and record.get("phase") == "checkpoint":
            self.losses.heard(record)
            if "bytes" in record:
                self.saved_step = int(record["step"])
            return True
        if kind == "event" and "lost_from" in record:
            self._came_back(member, int(record["lost_from"]))
            return True
        return False

    def count_death(self, member: Member, how: str, *, unsent_rows: int = 0) -> str | None:
        """Counts a death, and the rows of gradient that died with it; why the job must end, or None."""
        if not self.on:
            return how
        count, step = self._deaths.get((member.role, member.index), (0, -2))
        count = count + 1 if self.furthest <= step else 1
        self._deaths[member.role, member.index] = count, self.furthest
        self.died.append(_death(member.role, member.index, how))
        self.unsent_rows += unsent_rows
        if count > self.restarts:
            return f"{how}; it died {count} times without one more trained step (liveness.restarts: {self.restarts})"
        return None

    def seen(self, symptom: str) -> str | None:
        """Counts a group that was lost while nobody's death is known yet; why the job must end, or None."""
        self.symptoms.append(symptom)
        count, step = self._losses
        self._losses = (count + 1 if self.furthest <= step else 1), self.furthest
        if self._losses[0] > MOST_LOSSES * self.restarts:
            return f"{symptom}; the group was lost {self._losses[0]} times without one more trained step"
        return None

    def over(self, generation: int, start: Start, seconds: float, *, time: str) -> Record:
        """Records that a generation has formed again, at the time of day `time`. Returns the record."""
        anew = start.source < 0
        record: Record = {
            "time": time,
            "cause": self.cause,
            "died": list(self.died),
            "generation": generation,
            "step": start.step,
            "seconds": round(seconds, 3),
            "anew": anew,
            "lost_steps": max(0, self.reached - start.step) if anew else _lost_alone(start.step, self.died),
            "lost_unsent_rows": 0 if anew else self.unsent_rows,
        }
        if anew:
            self.reached = start.step
        self.done.append(record)
        return record

    def outlived(self, generation: int, *, time: str) -> Record:
        """Records a restart of the coordinator. Returns the record; its step is the next that a worker reports."""
        record: Record = {
            "time": time,
            "cause": RESTARTED,
            "died": [_death("coordinator", 0, RESTARTED)],
            "generation": generation,
            "step": None,
            "seconds": 0.0,
            "anew": False,
            "lost_steps": 0,
            "lost_unsent_rows": 0,
        }
        self.done.append(record)
        return record

    def refusal(
        self, start: Start, servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]
    ) -> str | None:
        """Why the job ends in place of beginning there; None = it continues."""
        holders = [one for one in workers.values() if one.holds]
        ranges = [*servers.values(), *(() if holders else workers.values())]
        if start.source < 0:
            lost = max([self.reached, *(one.last for one in holders)]) - start.step
            self.reached = max([self.reached, *(one.last for one in servers.values() if one.holds)])  # for the record
            step = start.step
        else:
            step = min((one.lost_from for one in ranges if one.lost_from is not None), default=start.step)
            lost = start.step - step
        return self.losses.refusal(lost, step=step, ranges=ranges, cause=self.cause)

    def clear(self) -> None:
        """Forgets the deaths before a generation that has formed."""
        self.died, self.symptoms, self.unsent_rows = [], [], 0

    def to_record(self) -> Record:
        """The state for another coordinator, as JSON types. That one counts deaths in a row from 1 again."""
        return {
            "saved_step": self.saved_step,
            "furthest": self.furthest,
            "reached": self.reached,
            "done": list(self.done),
            "died": list(self.died),
            "symptoms": list(self.symptoms),
            "unsent_rows": self.unsent_rows,
            "period": self.losses.period,
            "failed": self.losses.failed,
        }

    @classmethod
    def from_record(cls, record: Record) -> Recoveries:
        """The inverse, with `restarts` 0. Raises KeyError, TypeError or ValueError for an invalid record."""
        return cls(
            restarts=0,
            saved_step=int(record["saved_step"]),
            furthest=int(record["furthest"]),
            reached=int(record["reached"]),
            done=[dict(each) for each in record["done"]],
            died=[dict(each) for each in record["died"]],
            symptoms=[str(text) for text in record["symptoms"]],
            unsent_rows=int(record["unsent_rows"]),
            losses=Losses(period=record.get("period"), failed=bool(record.get("failed", False))),
        )

    def _came_back(self, server: Member, lost_from: int) -> None:
        """Records that a replaced server lacks its updates since `lost_from`. The group may have formed meanwhile."""
        told = [(death, record) for record in self.done for death in record["died"]]
        told += [(death, {}) for death in self.died]
        for death, record in reversed(told):
            if (death["role"], death["index"]) == (server.role, server.index):
                death["lost_from"] = lost_from
                if record and not record["anew"]:
                    record["lost_steps"] = _lost_alone(record["step"], record["died"])
                return


def sentence(record: Record) -> str:
    """A recovery in words: why, where training resumed, what is lost."""
    where = " from the members' own state"
    if record["anew"]:
        where = " from the last checkpoint" if record["step"] else " from the beginning"
    others = dict.fromkeys(f"{death['role']} {death['index']}" for death in record["died"][:-1])
    also = f"; so did {', '.join(others)} before" if others else ""
    text = f"{record['cause']}{also}; training resumes at step {record['step']}{where}, after {record['seconds']:.1f} s"
    if not record["anew"]:
        since = {death["index"]: death["lost_from"] for death in record["died"] if death["lost_from"] is not None}
        text += "".join(f"; server {index} lost its updates since step {step}" for index, step in since.items())
    if record["lost_unsent_rows"]:
        text += f"; unsent gradient of {record['lost_unsent_rows']:,} rows is lost"
    return text


def meanwhile(job: JobState) -> str:
    """A restart of the coordinator in words; `job`: the state in which it found the job."""
    if job.state == "training":
        return f"{RESTARTED}; training resumed meanwhile"
    return f"{RESTARTED} while the job was {job.state}" + (f": {job.message}" if job.message else "")


def _death(role: str, index: int, cause: str) -> Record:
    return {"role": role, "index": index, "cause": cause, "lost_from": None}


def _lost_alone(step: int, died: Sequence[Record]) -> int:
    """The most steps before `step` whose updates one server lost."""
    return max([0, *(step - int(death["lost_from"]) for death in died if death["lost_from"] is not None)])
