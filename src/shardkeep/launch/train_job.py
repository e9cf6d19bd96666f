"""Starts, watches and stops the processes of one job on this machine, and leaves none behind."""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError
from shardkeep.launch.processes.role_starts import RoleStarts
from shardkeep.launch.stopping.ending import Ending
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.supervision import POLL_S, Supervision
from shardkeep.page.of_job import page_line, page_text
from shardkeep.ps.control.records import TRAINED
from shardkeep.records.lines import Tail
from shardkeep.records.training import Progress
from shardkeep.run.folder import RunFolder

if TYPE_CHECKING:
    from shardkeep.view.job_view import JobView

STOP_S, SAVING_STOP_S = 6.0, 600.0
"""Seconds a job gets to stop; the second number if it writes a checkpoint at its end."""
VERDICT_S = 4.0
"""Seconds the coordinator gets, after a member's death, to report why the job failed."""
CLOSE_S = 15.0
"""Seconds the roles get to end after a job whose steps are all trained."""
FAILED_S = 1.0
"""Seconds the roles get to end after any other job: the peers of a dead process may be blocked."""
TERMINATE_S = 1.0
LAST_S = 2.0
"""Seconds of `liveness.grace_s` reserved for ending the processes and reporting it."""


class TrainJob:
    """The processes of one job, from start to end."""

    def __init__(
        self,
        roles: RoleStarts,
        folder: RunFolder,
        screen: JobView,
        interrupts: Interrupts,
        start_step: int = 0,
    ) -> None:
        self._config, self._folder, self._screen, self._interrupts = roles.config, folder, screen, interrupts
        self._starter = roles.starter
        self._tail = Tail(folder.metrics_path, from_end=start_step > 0)
        self._step = start_step or None
        say = functools.partial(screen.phase, "restart")
        self._job = Supervision(roles, say=say, terminate_s=TERMINATE_S)

    def run(self) -> dict[str, Any]:
        """Starts all roles and waits for the end of the job. Leaves no process behind, even after an error."""
        self._interrupts.tolerated = 1_000_000
        try:
            with self._job:
                self._start()
                end = self._watch()
                self._close()
        except OSError as error:  # the folder was removed or made read-only
            why = error.strerror or error
            raise JobError(f"{self._folder.path}: the run folder cannot be used any more ({why})") from error
        finally:
            self._folder.forget_token()
            self._folder.forget_recovery()
        job, interrupted = self._job, bool(self._interrupts.count)
        late, given_up = end == "late", end == "given up"
        ending = Ending(self._config, self._folder, self._step, late, given_up, job.no_take_over)
        return ending.conclude(job.deaths, interrupted=interrupted, heard=job.line.heard)

    def _start(self) -> None:
        began = time.monotonic()
        while not self._starter.ready(POLL_S):
            if self._interrupts.count:
                return
        self._job.processes.start("coordinator")
        # The others read the coordinator's address from the run folder: their imports take longer than its start.
        for role, count in (("worker", self._config.workers), ("server", self._config.servers)):
            for index in range(count):
                self._job.processes.start(role, index)
        import shardkeep.ps.control.grpc.client  # noqa: F401 - while the roles start; needed at once when one dies

        self._job.until(lambda: self._formed() or self._ends)
        if self._formed():
            members = f"{_plural(self._config.servers, 'server')}, {_plural(self._config.workers, 'worker')}"
            self._screen.phase("start", f"coordinator, {members}; formed in {time.monotonic() - began:.1f} s")
            if self._config.web.has_page and (page := page_line(self._folder.path)) is not None:
                self._screen.phase("page", page_text(self._folder.path, page, sys.stdout, sys.stderr))

    def _formed(self) -> bool:
        """Whether the group has formed. Keeps the coordinator's address for deaths after the job."""
        self._job.line.endpoint()
        return bool(self._folder.member_list())

    @property
    def _ends(self) -> bool:
        """Whether the job stops, is over, or a child has ended too early."""
        return bool(self._interrupts.count or self._job.fatal() or self._job.over or not self._job.alive)

    def _watch(self) -> str:
        """Shows records and reports deaths and Ctrl-C, until the job is over or cannot continue. Returns `late` if it
        did not stop within its grace, `given up` if the coordinator did not report the job's end after a death."""
        limit: Deadline | None = None
        stopping = hurried = False
        while self._job.alive:
            self._show_records()
            self._job.look(replaces=limit is None or stopping)
            if self._job.over or self._interrupts.at_once:
                break
            if limit is not None and stopping and self._interrupts.terminated and not hurried:
                grace_s = self._config.liveness.grace_s - LAST_S
                limit, hurried = Deadline(min(limit.remaining_s, grace_s)), True
            if limit is not None and limit.over:
                late = "late" if self._interrupts.terminated else ""
                return late if stopping else "given up"
            if limit is None and self._interrupts.count:
                saves = self._config.checkpoint.on
                limit, stopping = Deadline(SAVING_STOP_S if saves else STOP_S), True
                what = "stopping, with a checkpoint" if saves else "stopping"
                again = "" if self._interrupts.reason else " again"
                self._screen.phase("stop", f"{what}; press Ctrl-C{again} to end it at once")
                self._job.line.request_stop(self._interrupts.reason or "Ctrl-C or SIGTERM")
            elif limit is None and (deaths := self._job.fatal()):
                alone = any(death.role == "coordinator" for death in deaths)
                limit = Deadline(0.0 if alone else VERDICT_S)
            time.sleep(POLL_S)
        return ""

    def _close(self) -> None:
        """Waits, after the job, for the roles to end."""
        summary = self._folder.summary()
        if summary is not None and not self._interrupts.at_once:
            deadline = Deadline(CLOSE_S if summary["status"] in TRAINED else FAILED_S)
            self._job.until(
                lambda: not self._job.processes.running() or deadline.over or self._interrupts.at_once, replaces=False
            )
        self._show_records()

    def _show_records(self) -> None:
        for record in self._tail:
            if isinstance(record, Progress):
                self._step = self._step if record.step is None else record.step
            self._screen.record(record)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
