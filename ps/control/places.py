"""Places: admits members to the job or refuses them."""

from __future__ import annotations

from collections.abc import Mapping

from shardkeep.base.errors import JobError, ProtocolError
from shardkeep.ps.control.job import Job
from shardkeep.ps.control.membership import SILENT_S, Seat
from shardkeep.ps.control.records import Hello, Member
from shardkeep.ps.control.recovery import Recovery
from shardkeep.ps.control.versions import check_versions


class Places:
    """Admits members. Call it within a transaction.

    Args:
        job: What it changes.
        recovery: Declares the member dead that a newcomer replaces.
        versions: The versions that a member must have.
    """

    def __init__(self, job: Job, recovery: Recovery, versions: Mapping[str, str]) -> None:
        self._job = job
        self._recovery = recovery
        self._versions = versions

    def admit(self, hello: Hello) -> Seat:
        """Returns the place of a member. A repeated Hello returns the same one.

        Raises ProtocolError (versions), ConfigError (no such place), UserError (place taken), JobError (late)."""
        job, member = self._job, hello.member
        check_versions(hello, self._versions)
        if not job.members.known(hello.token):
            job.members.check_place(member.role, member.index)
            self._make_room(member)
            self._refuse_when_late(member)
            job.members.admit(member, hello.token, job.clock())
            job.events.note(f"{member} registered")
        return job.members.seat(hello.token)

    def touch(self, token: str) -> Seat:
        """Returns the place of a member and renews its lease. Raises ProtocolError if the member has none any more."""
        seat = self._job.members.seat(token)
        if seat.lost and self._job.life.running:
            raise ProtocolError(f"{seat.member} was declared dead, and the job continued without it")
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
        return min(SILENT_S, self._job.members.lease_s)

    def _make_room(self, newcomer: Member) -> None:
        """Declares the member before `newcomer` dead before its lease ends: it is silent, and somebody started another
        process in its place."""
        job = self._job
        held = job.members.at(newcomer.role, newcomer.index)
        if (
            job.recoveries.on
            and job.life.now.state in ("training", "recovering")
            and held is not None
            and not held.gone
        ):
            silent_s = job.clock() - held.last_seen
            if silent_s > self._silent_s:
                text = f"{held.member} died: no heartbeat for {silent_s:.0f} s, and another process took its place"
                self._recovery.lose(held, text)

    def _refuse_when_late(self, member: Member) -> None:
        state = self._job.life.now
        if state.over or state.state == "stopping":
            why = f": {state.message}" if state.message else ""
            raise JobError(f"{member.name} comes too late: the job is {state.state}{why}")
        held = self._job.members.at(member.role, member.index)
        if held is not None and held.gone and not (self._job.recoveries.on and held.lost):
            raise JobError(f"{member.name} was in the job already ({held.member}) and cannot be replaced")
