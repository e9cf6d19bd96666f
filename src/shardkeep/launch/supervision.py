"""Supervision: what `train`, `serve`, `with` and `node` share. Shows nothing, and judges no job."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardkeep.base.errors import UserError
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes.children import Death
from shardkeep.launch.processes.job_processes import JobProcesses
from shardkeep.launch.processes.role_starts import RoleStarts
from shardkeep.launch.restart_policy import Restarts, Vacancy

POLL_S = 0.05


class Supervision:
    """The role processes of one job on this machine: starts them, replaces killed ones and reports deaths. Leaves none
    behind a `with`.

    Args:
        say: Shows one line.
        terminate_s: Seconds that processes get at the end of the `with`.
        continues: Whether coordinators continue the job by themselves. Then the members leave in order at the end, and
            a coordinator that still runs is killed: another one continues the job.
    """

    def __init__(
        self, roles: RoleStarts, *, say: Callable[[str], None], terminate_s: float, continues: bool = False
    ) -> None:
        self._folder, self._config = roles.folder, roles.config
        self._say, self._terminate_s, self._continues = say, terminate_s, continues
        self._restarts = Restarts(self._config.recovery.restarts)
        self.line, self.processes = CoordinatorLine(roles.folder), JobProcesses(roles)
        self.no_take_over = ""
        """Why no coordinator could take over, as the end of a message."""
        self.deaths: list[Death] = []
        """The processes that ended badly, without those that the end of the `with` ended."""

    def __enter__(self) -> Supervision:
        if self._config.recovery.restarts:
            self.line.watch(self._config.liveness.lease_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
        self.deaths = self.processes.deaths()  # before this process ends children that hang
        if self._continues:
            self.processes.ask_to_leave("worker", "server")
        self.processes.end(grace_s=self._terminate_s)

    @property
    def over(self) -> bool:
        """Whether the job has a summary."""
        return self._folder.summary() is not None

    def until(self, done: Callable[[], bool], *, replaces: bool = True) -> None:
        """Looks again and again until `done`."""
        while not done():
            self.look(replaces=replaces)
            time.sleep(POLL_S)

    def look(self, *, replaces: bool = True) -> None:
        """Ends silent processes, replaces those that were killed since the last look, and reports deaths."""
        self._end_silent()
        if replaces:
            self._replace_dead()
        for death in self.processes.deaths():
            final = self._restarts.fatal(death)
            if death.role != "coordinator" and (final or not replaces):  # else the next look replaces it
                self.line.report(death, final=final)

    @property
    def alive(self) -> bool:
        """Whether a process is running or will be started."""
        processes, restarts = self.processes, self._restarts
        return bool(restarts.vacancies) or processes.running() or not all(map(restarts.fatal, processes.ended()))

    def fatal(self) -> list[Death]:
        """The deaths of processes that are not replaced."""
        return [death for death in self.processes.deaths() if self._restarts.fatal(death)]

    def _end_silent(self) -> None:
        """Kills a coordinator that answers no more, so that another can take over, and members whose lease is over, so
        that they do not wake up beside their replacements."""
        for member in self.line.lost:
            self.processes.kill(member.role, member.index, member.pid)
        coordinator = self.processes.coordinator()
        if self.line.silent(0 if coordinator is None else coordinator.pid) and coordinator is not None:
            coordinator.kill()

    def _replace_dead(self) -> None:
        """Replaces killed processes.

        A replacement starts when the coordinator knows of the death and the restart policy's delay is over.
        A stopping job replaces only the coordinator."""
        if self.over:  # deaths no longer matter
            return
        if self.line.stop_heard:
            self._restarts.only_coordinator()
        for death in self.processes.ended():
            if not self._restarts.fatal(death):
                self._replace(death)
        for vacancy in self._restarts.take_due(self._may_start):
            self.processes.start(vacancy.role, vacancy.index)

    def _replace(self, death: Death) -> None:
        """Opens the vacancy of a killed child, unless the job stops or does not survive the death."""
        stops = self.line.stop_heard and death.role != "coordinator"
        if stops or not self._restarts.counts(death, self.line.step()) or not self._may_take_over(death):
            self._restarts.refuse(death)
            return
        self.processes.forget(death)
        self._restarts.replace(death)
        self._say(f"{death.text()}; starting another")
        if death.role != "coordinator":
            self.line.report(death, final=False)

    def _may_start(self, vacancy: Vacancy) -> bool:
        """Whether the coordinator knows of the death, or is itself the vacancy."""
        return vacancy.role == "coordinator" or self.line.settled(vacancy.pid)

    def _may_take_over(self, death: Death) -> bool:
        """Whether a new coordinator can continue the job. A coordinator that never listened is simply started again."""
        if death.role == "coordinator" and not self._continues and self._folder.address() is not None:
            try:
                self._folder.take_over()
            except UserError as error:
                again = f"`shardkeep train --resume {self._folder.path}` resumes from the last checkpoint"
                self.no_take_over = f"; {error}; {again}"
                return False
        return True
