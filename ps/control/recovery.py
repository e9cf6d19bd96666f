"""Recovery: how often a member may die, and where the next generation begins. Pure logic: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardkeep.ps.control.records import ANY_STEP, Member, Record, Span

MOST_LOSSES = 3
"""A group may be lost so many times for each death that one member may have: a death can break more than one."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a generation begins; the fields as in Formation."""

    step: int
    source: int = -1
    lacking: tuple[int, ...] = ()


def agreed_start(servers: Mapping[int, Span], workers: Mapping[int, Span]) -> Start | None:
    """The last step at which all servers can begin and some worker holds the tower, which the others then take; None
    where there is none. That nobody's push is missing is the servers' to say: workers set no other limit."""
    holders = {rank: span for rank, span in workers.items() if span.holds}
    first = max((span.first for span in servers.values()), default=0)
    last = min((span.last for span in servers.values()), default=ANY_STEP)
    step = max((min(last, span.last) for span in holders.values() if span.first <= last), default=-1)
    if step < first:
        return None
    having = [rank for rank, span in holders.items() if span.first <= step <= span.last]
    return Start(step, min(having), tuple(sorted(workers.keys() - set(having))))


@dataclass
class Recoveries:
    """The deaths and recoveries of a job.

    `restarts`: deaths of one member in a row, without one more trained step, that the job outlives.
    `saved_step`: of the last checkpoint; 0 = the job would begin anew."""

    restarts: int
    saved_step: int
    furthest: int = -1
    """The last step that any worker told of."""
    done: list[Record] = field(default_factory=list)
    """For the summary: who, how, the generation and step at which training went on, seconds without a group."""
    unsent_rows: int = 0
    """Rows of gradient, or of its rounding errors, that those who died since the last formation had not sent."""
    _deaths: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _losses: tuple[int, int] = (0, -2)
    _causes: list[str] = field(default_factory=list)

    @property
    def on(self) -> bool:
        return self.restarts > 0

    def trained(self, step: int) -> None:
        self.furthest = max(self.furthest, step)

    def died(self, member: Member, how: str, *, unsent_rows: int = 0) -> str | None:
        """Counts a death, and the rows of gradient that died with it; why the job cannot go on, or None when it can."""
        if not self.on:
            return how
        count, step = self._deaths.get((member.role, member.index), (0, -2))
        count = count + 1 if self.furthest <= step else 1
        self._deaths[member.role, member.index] = count, self.furthest
        self._causes.insert(0, how)  # a death comes before what others saw of it
        self.unsent_rows += unsent_rows
        if count > self.restarts:
            return f"{how}; it died {count} times without one more trained step (liveness.restarts: {self.restarts})"
        return None

    def seen(self, symptom: str) -> str | None:
        """Counts a group that was lost while nobody's death is known yet; why the job cannot go on, or None."""
        self._causes.append(symptom)
        count, step = self._losses
        self._losses = (count + 1 if self.furthest <= step else 1), self.furthest
        if self._losses[0] > MOST_LOSSES * self.restarts:
            return f"{symptom}; the group was lost {self._losses[0]} times without one more trained step"
        return None

    @property
    def cause(self) -> str:
        return self._causes[0] if self._causes else ""

    def over(self, generation: int, start: Start, seconds: float, *, cause: str = "") -> Record:
        """A generation has formed again, or `cause` was outlived without that; the record of it."""
        record: Record = {
            "cause": cause or self.cause,
            "generation": generation,
            "step": start.step,
            "seconds": round(seconds, 3),
            "anew": start.source < 0,
            "lost_steps": max(0, self.furthest - start.step) if start.source < 0 else 0,
            "lost_unsent_rows": 0 if cause or start.source < 0 else self.unsent_rows,
        }
        if not cause:
            self._causes.clear()
            self.unsent_rows = 0
        self.done.append(record)
        return record
