"""Starts, watches and stops the processes of one job on this machine, and leaves none behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shardkeep.affinity import Pins
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError
from shardkeep.config import JobConfig
from shardkeep.launch.children import Spawn, Starter
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.ending import Ending
from shardkeep.launch.interrupts import Interrupts
from shardkeep.launch.processes import JobProcesses
from shardkeep.launch.replacing import Replacing
from shardkeep.launch.role_starts import RoleStarts
from shardkeep.launch.silence import watch_silence
from shardkeep.page.of_job import page_line
from shardkeep.run.folder import RunFolder
from shardkeep.run.job_view import JobView
from shardkeep.run.reader import MetricsTail

POLL_S = 0.05
STOP_S, SAVING_STOP_S = 6.0, 600.0
"""Seconds a job gets to stop; the second number if it writes a checkpoint at its end."""
VERDICT_S = 4.0
"""Seconds the coordinator gets, after a member's death, to report why the job failed."""
CLOSE_S = 15.0
"""Seconds the roles get to end after a completed job."""
FAILED_S = 1.0
"""Seconds the roles get to end after any other job: the peers of a dead process may be blocked."""
TERMINATE_S = 1.0
LAST_S = 2.0
"""Seconds of `liveness.grace_s` reserved for ending the processes and reporting it."""


class Supervisor:
    """The processes of one job, from start to end."""

    def __init__(
        self,
        config: JobConfig,
        folder: RunFolder,
        screen: JobView,
        interrupts: Interrupts,
        code_folder: Path | None,
        pins: Pins,
        start_step: int = 0,
        starter: Starter | None = None,
    ) -> None:
        self._config, self._folder, self._screen, self._interrupts = config, folder, screen, interrupts
        self._roles = RoleStarts(
            config, folder, starter or Spawn(), pins, code_folder=code_folder, start_step=start_step
        )
        self._line = CoordinatorLine(folder)
        self._processes = JobProcesses(self._roles, self._line)
        self._tail = MetricsTail(folder.metrics_path, from_end=start_step > 0)
        self._ending = Ending(config, folder, step=start_step or None)
        self._replacing = Replacing(
            self._processes,
            self._line,
            folder,
            limit=config.liveness.restarts,
            step=lambda: self._ending.step,
            say=lambda text: screen.phase("restart", text),
        )

    def run(self) -> dict[str, Any]:
        """Starts all roles and waits for the end of the job. Leaves no process behind, even after an error."""
        from shardkeep.launch import scale

        self._interrupts.tolerated = 1_000_000
        scale.taken(self._folder.path)  # drops a request to an earlier start
        try:
            if self._config.liveness.restarts:
                watch_silence(self._line, self._processes, lease_s=self._config.liveness.lease_s)
            self._start()
            self._watch()
            self._close()
        except OSError as error:  # the folder was removed or made read-only
            why = error.strerror or error
            raise JobError(f"{self._folder.path}: the run folder cannot be used any more ({why})") from error
        finally:
            self._line.close()
            deaths = self._processes.deaths()  # before this process kills children that hang
            self._processes.end(grace_s=TERMINATE_S)
            self._folder.forget_token()
            self._folder.forget_recovery()
        self._ending.no_take_over = self._replacing.no_take_over
        summary = self._ending.conclude(deaths, interrupted=bool(self._interrupts.count), heard=self._line.heard)
        if (asked := scale.taken(self._folder.path)) is not None:
            self._screen.phase("scale", f"not with {', '.join(asked)}: all steps were trained by then")
        return summary

    def _start(self) -> None:
        began = time.monotonic()
        while not self._roles.ready(POLL_S):
            if self._interrupts.count:
                return
        self._processes.start("coordinator")
        # The others read the coordinator's address from the run folder: their imports take longer than its start.
        for role, count in (("worker", self._config.workers), ("server", self._config.servers)):
            for index in range(count):
                self._processes.start(role, index)
        import shardkeep.ps.control.grpc.client  # noqa: F401 - while the roles start; needed at once when one dies

        while not self._folder.member_list() and not self._ends:
            self._replacing.replace_dead()
            if not self._alive:
                return
            self._line.endpoint()
            time.sleep(POLL_S)
        self._line.endpoint()
        if self._folder.member_list():
            members = f"{_plural(self._config.servers, 'server')}, {_plural(self._config.workers, 'worker')}"
            self._screen.phase("start", f"coordinator, {members}; formed in {time.monotonic() - began:.1f} s")
            if self._config.page.on and (page := page_line(self._folder.path)) is not None:
                self._screen.phase("page", page)

    @property
    def _ends(self) -> bool:
        """Whether the job stops, is over, or a child has ended too early."""
        return bool(self._interrupts.count or self._replacing.fatal() or self._folder.summary() is not None)

    @property
    def _alive(self) -> bool:
        """Whether a role is running or will be started."""
        processes, replacing = self._processes, self._replacing
        return replacing.waiting or processes.running() or any(map(replacing.replaceable, processes.ended()))

    def _watch(self) -> None:
        """Shows records and reports deaths and Ctrl-C, until the job is over or cannot continue."""
        limit: Deadline | None = None
        stopping = hurried = False
        while self._alive:
            self._show_records()
            if limit is None or stopping:
                self._replacing.replace_dead()
            self._processes.report_deaths()
            if self._folder.summary() is not None or self._interrupts.at_once:
                return
            if limit is not None and stopping and self._interrupts.terminated and not hurried:
                grace_s = self._config.liveness.grace_s - LAST_S
                limit, hurried = Deadline(min(limit.remaining_s, grace_s)), True
            if limit is not None and limit.over:
                self._ending.out_of_grace = stopping and self._interrupts.terminated
                self._ending.given_up = not stopping
                return
            if limit is None and self._interrupts.count:
                saves = bool(self._config.checkpoint.every_steps)
                limit, stopping = Deadline(SAVING_STOP_S if saves else STOP_S), True
                what = "stopping, with a checkpoint" if saves else "stopping"
                again = "" if self._interrupts.reason else " again"
                self._screen.phase("stop", f"{what}; press Ctrl-C{again} to end it at once")
                self._line.request_stop(self._interrupts.reason or "Ctrl-C or SIGTERM")
            elif (
                not stopping and (deaths := self._replacing.fatal()) and (limit is None or self._line.outlived(deaths))
            ):
                alone = any(death.role == "coordinator" for death in deaths) or self._line.outlived(deaths)
                limit = Deadline(0.0 if alone else VERDICT_S)
            time.sleep(POLL_S)

    def _close(self) -> None:
        """Waits, after the job, for the roles to end."""
        summary = self._folder.summary()
        if summary is not None and not self._interrupts.at_once:
            deadline = Deadline(CLOSE_S if summary["status"] == "completed" else FAILED_S)
            while self._processes.running() and not deadline.over and not self._interrupts.at_once:
                self._processes.report_deaths()
                time.sleep(POLL_S)
        self._show_records()

    def _show_records(self) -> None:
        for record in self._tail:
            if record.get("kind") == "progress":
                self._ending.step = record.get("step", self._ending.step)
            self._screen.record(record)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
