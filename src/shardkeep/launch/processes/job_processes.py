"""JobProcesses: starts and ends the role processes of one job. Has no restart policy."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.base.machine.limits import Limit, limit_met
from shardkeep.launch.processes.children import Child, Death, end_all, wait_all
from shardkeep.launch.processes.role_starts import RoleStarts


class JobProcesses:
    """The role processes of one job."""

    def __init__(self, roles: RoleStarts) -> None:
        self._roles = roles
        self._children: list[Child] = []
        self._deaths: dict[Child, Death] = {}  # in the order in which they were seen
        self._limits, self._looking = (Limit("memory"), Limit("pids")), threading.Lock()

    def start(self, role: str, index: int = 0) -> None:
        """Starts a role; see `RoleStarts`."""
        self._children.append(self._roles.start(role, index))

    def running(self) -> bool:
        """Whether any process is running."""
        return any(child.running for child in self._children)

    def coordinator(self) -> Child | None:
        """The running coordinator, if any."""
        return next((child for child in self._children if child.role == "coordinator" and child.running), None)

    def ended(self) -> list[Death]:
        """How each ended child ended, also those that ended well, in the order in which this object saw it. Of those
        that one look sees, the likely cause is first: killed, left on a signal, wrong input, then others."""
        with self._looking:
            for limit in self._limits:
                limit.look()
            unseen = [child for child in list(self._children) if child not in self._deaths]
            found = [(child, death) for child in unseen if (death := child.death()) is not None]
            found.sort(key=lambda one: (one[1].code >= 0, not one[1].by_signal, one[1].code != UserError.exit_code))
            for child, death in found:
                met = limit_met(self._limits, killed=death.code == -signal.SIGKILL) if death.code else ""
                self._deaths[child] = replace(death, limit=met)
            return list(self._deaths.values())

    def deaths(self) -> list[Death]:
        """The children that ended badly, as `ended`."""
        return [death for death in self.ended() if death.code != 0]

    def kill(self, role: str, index: int, pid: int) -> None:
        """Kills the running process of a place, if it has this pid. Any thread may call it."""
        for child in list(self._children):
            if (child.role, child.index, child.pid) == (role, index, pid) and child.running:
                child.kill()

    def forget(self, death: Death) -> None:
        """Drops a dead child that another process replaces."""
        for child in [child for child in self._children if child.pid == death.pid]:
            self._children.remove(child)
            self._deaths.pop(child, None)
            child.kill()  # closes its pipe

    def wait(self, limit_s: float) -> None:
        """Waits up to `limit_s` for the processes to end."""
        wait_all(self._children, Deadline(limit_s))

    def ask_to_leave(self, *roles: str) -> None:
        """Asks the running processes of these roles to leave, as SIGTERM does where they heed it."""
        for child in self._children:
            if child.role in roles and child.running:
                child.ask_to_leave()

    def end(self, *, grace_s: float) -> None:
        """Ends the remaining processes: SIGTERM, `grace_s` seconds, SIGKILL."""
        end_all(self._children, grace_s=grace_s)
