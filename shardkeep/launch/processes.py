"""JobProcesses: starts and ends the role processes of one job, and reports their deaths. Has no restart policy."""

from __future__ import annotations

from collections.abc import Iterator

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.launch.children import Child, Death, end_all, wait_all
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.role_starts import RoleStarts


class JobProcesses:
    """The role processes of one job."""

    def __init__(self, roles: RoleStarts, line: CoordinatorLine) -> None:
        self._roles = roles
        self._line = line
        self._children: list[Child] = []

    def start(self, role: str, index: int = 0) -> None:
        """Starts a role. A coordinator that replaces a dead one takes over its job."""
        self._children.append(self._roles.coordinator() if role == "coordinator" else self._roles.member(role, index))

    def running(self) -> bool:
        """Whether any process is running."""
        return any(child.running for child in self._children)

    def coordinator(self) -> Child | None:
        """The running coordinator, if any."""
        return next((child for child in self._children if child.role == "coordinator" and child.running), None)

    def ended(self) -> Iterator[Death]:
        """How each ended child ended, also those that ended well."""
        return (death for child in list(self._children) if (death := child.death()) is not None)

    def deaths(self) -> list[Death]:
        """The children that ended badly, the likely cause first: ended by a signal, wrong input, then others."""
        ended = [death for death in self.ended() if death.code != 0]
        return sorted(ended, key=lambda death: (not death.by_signal, death.code != UserError.exit_code))

    def report_deaths(self) -> None:
        """Reports each dead member to the coordinator, once."""
        for death in self.deaths():
            if death.role != "coordinator":
                self._line.report(death)

    def kill(self, role: str, index: int, pid: int) -> None:
        """Kills the running process of a place, if it has this pid. Any thread may call it."""
        for child in list(self._children):
            if (child.role, child.index, child.pid) == (role, index, pid) and child.running:
                child.kill()

    def forget(self, death: Death) -> None:
        """Drops a dead child that another process replaces."""
        for child in [child for child in self._children if child.pid == death.pid]:
            self._children.remove(child)
            child.kill()  # closes its pipe

    def wait(self, limit_s: float) -> None:
        """Waits up to `limit_s` for the processes to end."""
        wait_all(self._children, Deadline(limit_s))

    def end(self, *, grace_s: float) -> None:
        """Ends the remaining processes: SIGTERM, `grace_s` seconds, SIGKILL."""
        end_all(self._children, grace_s=grace_s)
