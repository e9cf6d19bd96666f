"""Replacing: starts another process in the place of each one that was killed. Shows nothing, and ends no job."""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.base.errors import UserError
from shardkeep.launch.children import Death
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes import JobProcesses
from shardkeep.launch.restart_policy import Restarts, Vacancy
from shardkeep.run.folder import RunFolder


class Replacing:
    """Replaces the killed processes of one job.

    Args:
        limit: Deaths of one process in a row, without one more step, that the job survives.
        step: Returns the last step known; None = no step yet.
        say: Shows one line.
    """

    def __init__(
        self,
        processes: JobProcesses,
        line: CoordinatorLine,
        folder: RunFolder,
        *,
        limit: int,
        step: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self._processes, self._line, self._folder = processes, line, folder
        self._restarts = Restarts(limit)
        self._step, self._say = step, say
        self.no_take_over = ""
        """Why no coordinator could take over, as the end of a message."""

    @property
    def waiting(self) -> bool:
        """Whether a process will still be started."""
        return bool(self._restarts.vacancies)

    def replaceable(self, death: Death) -> bool:
        """Whether another process takes the place of this one."""
        return not self._restarts.fatal(death)

    def fatal(self) -> list[Death]:
        """The deaths of processes that are not replaced."""
        return [death for death in self._processes.deaths() if self._restarts.fatal(death)]

    def replace_dead(self) -> None:
        """Replaces killed processes.

        A replacement starts when the coordinator knows of the death and the restart policy's delay is over.
        A stopping job replaces only the coordinator."""
        if self._folder.summary() is not None:  # the job is over: deaths no longer matter
            return
        if self._line.stop_heard:
            self._restarts.only_coordinator()
        for death in self._processes.ended():
            if not self._restarts.fatal(death):
                self._replace(death)
        for vacancy in self._restarts.take_due(self._may_start):
            self._processes.start(vacancy.role, vacancy.index)

    def _replace(self, death: Death) -> None:
        """Opens the vacancy of a killed child, unless the job stops or does not survive the death."""
        stops = self._line.stop_heard and death.role != "coordinator"
        if stops or not self._restarts.counts(death, self._step()) or not self._may_take_over(death):
            self._restarts.refuse(death)
            return
        self._processes.forget(death)
        self._restarts.replace(death)
        self._say(f"{death.text()}; starting another")
        if death.role != "coordinator":
            self._line.report_until_heard(death)

    def _may_start(self, vacancy: Vacancy) -> bool:
        """Whether the coordinator knows of the death, or is itself the vacancy."""
        return vacancy.role == "coordinator" or self._line.settled(vacancy.pid)

    def _may_take_over(self, death: Death) -> bool:
        """Whether a new coordinator can continue the job. A coordinator that never listened is simply started again."""
        if death.role == "coordinator" and self._folder.address() is not None:
            try:
                self._folder.take_over()
            except UserError as error:
                self.no_take_over = (
                    f"; {error}; `shardkeep train --resume {self._folder.path}` resumes from the last checkpoint"
                )
                return False
        return True
