"""JobProcesses: the role processes of one job on this machine: started, found dead, reported, ended.

Knows no policy: who is started again is the supervisor's to say.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.launch.children import Child, Death, end_all, wait_all
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.role_starts import RoleStarts


class JobProcesses:
    """The children of one job."""

    def __init__(self, roles: RoleStarts, line: CoordinatorLine) -> None:
        self._roles = roles
        self._line = line
        self._children: list[Child] = []

    def start(self, role: str, index: int = 0) -> None:
        """Starts a role. A coordinator that follows a dead one takes over."""
        self._children.append(self._roles.coordinator() if role == "coordinator" else self._roles.member(role, index))

    def running(self) -> bool:
        """Whether any process runs."""
        return any(child.running for child in self._children)

    def coordinator(self) -> Child | None:
        """The coordinator that runs."""
        return next((child for child in self._children if child.role == "coordinator" and child.running), None)

    def ended(self) -> Iterator[Death]:
        """How each child that does not run has ended; well or badly."""
        return (death for child in list(self._children) if (death := child.death()) is not None)

    def deaths(self) -> list[Death]:
        """Children that ended badly, the likely cause first: ended by a signal, wrong input, then others."""
        ended = [death for death in self.ended() if death.code != 0]
        return sorted(ended, key=lambda death: (not death.by_signal, death.code != UserError.exit_code))

    def report_deaths(self) -> None:
        """Tells the coordinator of each dead member, once."""
        for death in self.deaths():
            if death.role != "coordinator":
                self._line.report(death)

    def kill(self, pid: int) -> None:
        """Kills a process that runs."""
        for child in self._children:
            if child.pid == pid and child.running:
                child.kill()

    def forget(self, death: Death) -> None:
        """Drops a dead child: another process takes its place."""
        for child in [child for child in self._children if child.pid == death.pid]:
            self._children.remove(child)
            child.kill()  # closes its pipe

    def wait(self, limit_s: float) -> None:
        """Gives the processes the time to end by themselves."""
        wait_all(self._children, Deadline(limit_s))

    def end(self, *, grace_s: float) -> None:
        """Ends what is left: SIGTERM, `grace_s` seconds, SIGKILL."""
        end_all(self._children, grace_s=grace_s)
