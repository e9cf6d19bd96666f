"""At which step the next generation begins, from what the members can resume. Pure logic: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardkeep.ps.control.records import ANY_STEP, ResumeRange


@dataclass(frozen=True, slots=True)
class Start:
    """Where a generation begins; the fields as in Formation."""

    step: int
    source: int = -1
    lacking: tuple[int, ...] = ()


def agreed_start(servers: Mapping[int, ResumeRange], workers: Mapping[int, ResumeRange]) -> Start | None:
    """The last step from which all servers can resume and some worker has the tower; None = there is none.

    Workers without the tower take it from that worker. The servers' ranges ensure that no push is missing."""
    holders = {rank: one for rank, one in workers.items() if one.holds}
    first = max((one.first for one in servers.values()), default=0)
    last = min((one.last for one in servers.values()), default=ANY_STEP)
    step = max((min(last, one.last) for one in holders.values() if one.first <= last), default=-1)
    if step < first:
        return None
    having = [rank for rank, one in holders.items() if one.first <= step <= one.last]
    return Start(step, min(having), tuple(sorted(workers.keys() - set(having))))


def last_saved(reported: int, ranges: Iterable[ResumeRange]) -> int:
    """The step of the last checkpoint that the members see. If none of them looks, the one that worker 0 reported.

    Somebody may have deleted it since."""
    return max((one.saved for one in ranges if one.saved >= 0), default=reported)
