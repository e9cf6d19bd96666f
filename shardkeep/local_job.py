"""The processes of one job on this machine: started, watched, stopped, none left behind. Decides how the job ended."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkeep.affinity import Pins
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, JobStopped, ShardkeepError, UserError
from shardkeep.children import Child, Death, Spawn, Starter, child_environment, end_all
from shardkeep.config import JobConfig
from shardkeep.interrupts import Interrupts
from shardkeep.ps.control.endpoint import Endpoint
from shardkeep.report import MetricsTail, RunFolder
from shardkeep.roles import out_of_grace
from shardkeep.screen import Screen

POLL_S = 0.05
STOP_S, SAVING_STOP_S = 6.0, 600.0
"""Seconds a job gets to stop in order; the second where it writes a checkpoint at its end."""
VERDICT_S = 4.0
"""Seconds the coordinator gets, after a member's death, to say why the job failed."""
CLOSE_S = 15.0
"""Seconds the roles get to end once the job is over."""
FAILED_S = 1.0
"""Seconds they get once it has failed: the peers of a dead process may be blocked."""
STARTING_S = 30.0
"""Seconds, at least, until a coordinator must have answered once: starts take long on a busy machine."""
TERMINATE_S = 1.0
LAST_S = 2.0
"""Seconds of `liveness.grace_s` that are left to end the processes, and to say so."""
RETRY_S = 0.2
"""Seconds until a stop that nobody heard is asked for again."""
TELL_S = 20.0
"""Seconds in which a coordinator must be there to hear of a death, before the member is started again."""
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
"""Seconds before a member that has died twice without one more step is started again, doubled with each death."""


class LocalJob:
    """The processes of one job, from start to end."""

    def __init__(
        self,
        config: JobConfig,
        folder: RunFolder,
        screen: Screen,
        interrupts: Interrupts,
        code_folder: Path | None,
        pins: Pins,
        start_step: int = 0,
        starter: Starter | None = None,
    ) -> None:
        self._starter = starter or Spawn()
        self._config, self._folder, self._screen, self._interrupts = config, folder, screen, interrupts
        self._env = child_environment(os.environ, threads=config.threads)
        self._code = [] if code_folder is None else ["--code", str(code_folder)]
        self._pins = pins
        self._start_step = start_step
        self._tail = MetricsTail(folder.metrics_path, from_end=start_step > 0)
        self._children: list[Child] = []
        self._vacancies: list[_Vacancy] = []
        self._deaths_without_step: dict[tuple[str, int], tuple[int, int | None]] = {}
        self._told: set[int] = set()
        self._not_replaced: set[int] = set()
        self._endpoint: Endpoint | None = None
        self._coordinator_heard = time.monotonic()
        self._step: int | None = start_step or None
        self._stop_heard = threading.Event()
        self._out_of_grace = False
        self._no_take_over = ""
        self._ended = threading.Event()

    def run(self) -> dict[str, Any]:
        """Starts all roles and waits for the end; whatever happens, no process is left behind."""
        from shardkeep import scale

        self._interrupts.tolerated = 1_000_000
        scale.taken(self._folder.path)  # what was asked of an earlier start
        try:
            if self._config.liveness.restarts:
                threading.Thread(target=self._watch_coordinator, name="watch-coordinator", daemon=True).start()
            self._start()
            self._watch()
            self._close()
        except OSError as error:  # it was removed, or nobody may write there any more
            why = error.strerror or error
            raise JobError(f"{self._folder.path}: the run folder cannot be used any more ({why})") from error
        finally:
            self._ended.set()
            deaths = self._deaths()  # before the children that hang are killed from here
            end_all(self._children, grace_s=TERMINATE_S)
            self._folder.forget_token()
            self._folder.forget_recovery()
        summary = self._outcome(deaths)
        if (asked := scale.taken(self._folder.path)) is not None:
            self._screen.phase("scale", f"not with {', '.join(asked)}: all steps were trained by then")
        return summary

    def _start(self) -> None:
        began = time.monotonic()
        while not self._starter.ready(POLL_S):
            if self._interrupts.count:
                return
        self._coordinator()
        # The others find the coordinator's address in the run folder: their imports take longer than its start.
        for role, count in (("worker", self._config.workers), ("server", self._config.servers)):
            for index in range(count):
                self._member(role, index)
        import shardkeep.ps.control.client  # noqa: F401 - now, while the roles start; needed fast when one dies

        while not self._folder.member_list() and not self._ending:
            self._replace_dead()
            time.sleep(POLL_S)
        if self._folder.member_list():
            members = f"{_plural(self._config.servers, 'server')}, {_plural(self._config.workers, 'worker')}"
            self._screen.phase("start", f"coordinator, {members}; formed in {time.monotonic() - began:.1f} s")

    def _coordinator(self) -> None:
        """The first one, or one that takes over at the address of the one that died."""
        start = ["--start-step", str(self._start_step)] if self._start_step else []
        if (address := self._folder.address()) is not None:
            start += ["--listen", address]
            start += ["--take-over"]
        self._child("coordinator", 0, [str(self._folder.config_path), "--run-dir", str(self._folder.path), *start])

    def _member(self, role: str, index: int) -> None:
        run = str(self._folder.path)
        code = self._code if role == "worker" else []
        self._child(role, index, ["--coordinator", run, "--index", str(index), "--run-dir", run, *code])

    def _child(self, role: str, index: int, arguments: list[str]) -> None:
        log, cores = self._folder.log_path(role, index), self._pins.get((role, index))
        self._children.append(self._starter.start(role, index, arguments, log=log, env=self._env, cores=cores))

    @property
    def _ending(self) -> bool:
        """Somebody wants the job to stop, it is over, or a child has ended before its time."""
        return bool(self._interrupts.count or self._fatal() or self._folder.summary() is not None)

    def _watch_coordinator(self) -> None:
        """Kills a coordinator that is silent for two leases, so that another can take over."""
        lease_s = self._config.liveness.lease_s
        answered = 0  # the coordinator that has, by pid
        while not self._ended.wait(lease_s / 4):
            endpoint = self._known_endpoint()
            now = next((child for child in self._children if child.role == "coordinator" and child.running), None)
            if endpoint is None or now is None:
                self._coordinator_heard = time.monotonic()
            elif _answers(endpoint, timeout_s=lease_s / 2):
                self._coordinator_heard, answered = time.monotonic(), now.pid
            else:
                patience_s = 2 * lease_s if now.pid == answered else max(2 * lease_s, STARTING_S)
                if time.monotonic() - self._coordinator_heard > patience_s:
                    now.kill()
                    self._coordinator_heard = time.monotonic()

    def _watch(self) -> None:
        """Until the job is over or cannot go on: shows records, passes on deaths and Ctrl-C."""
        limit: Deadline | None = None
        stopping = hurried = False
        while self._vacancies or any(child.running for child in self._children):
            self._show_records()
            if limit is None or stopping:
                self._replace_dead()
            self._tell_deaths()
            if self._folder.summary() is not None or self._interrupts.at_once:
                return
            if limit is not None and stopping and self._interrupts.terminated and not hurried:
                grace_s = self._config.liveness.grace_s - LAST_S
                limit, hurried = Deadline(min(limit.remaining_s, grace_s)), True
            if limit is not None and limit.over:
                self._out_of_grace = stopping and self._interrupts.terminated
                return
            if limit is None and self._interrupts.count:
                saves = bool(self._config.checkpoint.every_steps)
                limit, stopping = Deadline(SAVING_STOP_S if saves else STOP_S), True
                what = "stopping, with a checkpoint" if saves else "stopping in order"
                self._screen.phase("stop", f"{what}; once more Ctrl-C ends it at once")
                threading.Thread(target=self._insist_on_stop, name="ask-to-stop", daemon=True).start()
            elif limit is None and (deaths := self._fatal()):
                alone = any(death.role == "coordinator" for death in deaths)
                limit = Deadline(0.0 if alone else VERDICT_S)
            time.sleep(POLL_S)

    def _close(self) -> None:
        """The job is over: gives the roles the time to end by themselves."""
        summary = self._folder.summary()
        if summary is not None and not self._interrupts.at_once:
            deadline = Deadline(CLOSE_S if summary["status"] == "completed" else FAILED_S)
            while any(child.running for child in self._children) and not deadline.over and not self._interrupts.at_once:
                self._tell_deaths()
                time.sleep(POLL_S)
        self._show_records()

    def _replace_dead(self) -> None:
        """Starts another process for each member that was killed, as soon as the coordinator knows of the death and
        its time has come: the first time at once, then later and later. In a job that stops, the coordinator alone."""
        if self._folder.summary() is not None:  # it is over, whoever dies
            return
        stops = self._stop_heard.is_set()
        if stops:
            self._vacancies = [vacancy for vacancy in self._vacancies if vacancy.role == "coordinator"]
        for child in list(self._children):
            death = child.death()
            if death is None or not death.by_signal or death.pid in self._not_replaced:
                continue
            if stops and death.role != "coordinator":
                continue
            if not self._may_die(death) or not self._may_take_over(death):
                self._not_replaced.add(death.pid)
                continue
            self._children.remove(child)
            count, _ = self._deaths_without_step[death.role, death.index]
            delay_s = 0.0 if count == 1 else min(BACKOFF_S * 2 ** (count - 2), LONGEST_BACKOFF_S)
            vacancy = _Vacancy(death.role, death.index, time.monotonic() + delay_s)
            self._vacancies.append(vacancy)
            self._screen.phase("restart", f"{death.text()}; starting another")
            self._told.add(death.pid)
            if death.role == "coordinator":
                vacancy.told.set()
            else:
                self._ask(functools.partial(_report_death, death=death, done=vacancy.told))
        for vacancy in list(self._vacancies):
            if vacancy.due <= time.monotonic() and (vacancy.told.is_set() or self._folder.address() is None):
                self._vacancies.remove(vacancy)
                if vacancy.role == "coordinator":
                    self._coordinator()
                else:
                    self._member(vacancy.role, vacancy.index)

    def _may_die(self, death: Death) -> bool:
        """Counts a death; whether the job outlives it."""
        count, step = self._deaths_without_step.get((death.role, death.index), (0, None))
        count = count + 1 if step == self._step else 1
        if count > self._config.liveness.restarts:
            return False
        self._deaths_without_step[death.role, death.index] = count, self._step
        return True

    def _may_take_over(self, death: Death) -> bool:
        """Whether another coordinator can go on: one that has never listened is begun again."""
        if death.role == "coordinator" and self._folder.address() is not None:
            try:
                self._folder.take_over()
            except UserError as error:
                self._no_take_over = (
                    f"; {error}; `shardkeep train --resume {self._folder.path}` goes on from the last checkpoint"
                )
                return False
        return True

    def _tell_deaths(self) -> None:
        """Tells the coordinator once of each member that died: sooner than its lease would."""
        for death in self._deaths():
            if death.pid not in self._told and death.role != "coordinator":
                self._told.add(death.pid)
                self._ask(functools.partial(_report_death, death=death))

    def _insist_on_stop(self) -> None:
        """Asks the job to stop until somebody hears it: the coordinator may not listen yet, or be on its way back."""
        from shardkeep.ps.control.client import request_stop

        while not self._ended.is_set():
            try:
                if (coordinator := self._folder.endpoint()) is not None:
                    request_stop(coordinator, "Ctrl-C or SIGTERM")
                    self._stop_heard.set()
                    return
            except ShardkeepError as error:
                if not error.retryable:  # the loop's limit ends the job
                    return
            self._ended.wait(RETRY_S)

    def _ask(self, call: Callable[[Endpoint], None]) -> None:
        """Calls the coordinator beside the loop; one that does not answer is seen by its limit."""
        if (coordinator := self._known_endpoint()) is not None:
            threading.Thread(target=call, args=(coordinator,), name="ask-coordinator", daemon=True).start()

    def _known_endpoint(self) -> Endpoint | None:
        """The coordinator, once it has listened; one that takes over is at the same address."""
        if self._endpoint is None:
            with contextlib.suppress(ShardkeepError):  # its token went with the job
                self._endpoint = self._folder.endpoint()
        return self._endpoint

    def _deaths(self) -> list[Death]:
        """Children that ended badly, the likely cause first: ended by a signal, wrong input, then others."""
        ended = [death for child in self._children if (death := child.death()) is not None and death.code != 0]
        return sorted(ended, key=lambda death: (not death.by_signal, death.code != UserError.exit_code))

    def _fatal(self) -> list[Death]:
        """Those of `_deaths` that nobody is started for."""
        return [death for death in self._deaths() if not death.by_signal or death.pid in self._not_replaced]

    def _show_records(self) -> None:
        for record in self._tail:
            if record.get("kind") == "progress":
                self._step = record.get("step", self._step)
            elif "lost_pid" in record:  # taken for dead by its lease: it must not wake up beside its replacement
                for child in self._children:
                    if child.pid == record["lost_pid"] and child.running:
                        child.kill()
            self._screen.record(record)

    def _outcome(self, deaths: list[Death]) -> dict[str, Any]:
        """The summary of a completed job; raises for any other, and sees to it that summary.json says the same."""
        summary = self._folder.summary() or {}
        status = summary.get("status")
        if status == "completed":
            return summary
        if status == "stopped" or (status is None and self._interrupts.count):
            raise JobStopped(self._settled(summary, "stopped", self._stopped_text()))
        message = self._settled(summary, "failed", self._failed_text(deaths), cause=deaths[0] if deaths else None)
        if any(death.code == UserError.exit_code for death in deaths):
            raise UserError(message)
        raise JobError(f"{message}; logs: {self._folder.logs}")

    def _settled(self, summary: Mapping[str, Any], status: str, text: str, *, cause: Death | None = None) -> str:
        """The coordinator's message, unless it has none or names a survivor where a process was killed."""
        message = str(summary.get("message") or "")
        if message and (cause is None or not cause.by_signal or f"(pid {cause.pid} " in message):
            return message
        try:
            self._folder.finished(status, text, summary or {"steps": self._step or 0})
        except OSError as error:
            return f"{text}; {self._folder.path}: cannot be written ({error.strerror or error})"
        return text

    def _stopped_text(self) -> str:
        late = f"; {out_of_grace(self._config, self._folder.path)}" if self._out_of_grace else ""
        return f"stopped {'before the first step' if self._step is None else f'at step {self._step}'}{late}"

    def _failed_text(self, deaths: list[Death]) -> str:
        last = f"last step {self._step}" if self._step is not None else "before the first step"
        ended = f"{deaths[0].text()}, {last}" if deaths else f"the roles ended without a summary, {last}"
        return ended + self._no_take_over


@dataclass
class _Vacancy:
    """The place of a member that was killed, until another process is started for it."""

    role: str
    index: int
    due: float
    told: threading.Event = field(default_factory=threading.Event)


def _answers(coordinator: Endpoint, *, timeout_s: float) -> bool:
    from shardkeep.ps.control.client import fetch_status

    with contextlib.suppress(ShardkeepError):
        fetch_status(coordinator, timeout_s=timeout_s)
        return True
    return False


def _report_death(coordinator: Endpoint, *, death: Death, done: threading.Event | None = None) -> None:
    from shardkeep.ps.control.client import report_death

    deadline = Deadline(TELL_S if done is not None else 0.0)
    while True:  # the coordinator may be on its way back itself
        try:
            report_death(coordinator, role=death.role, index=death.index, pid=death.pid, reason=death.how())
        except ShardkeepError as error:
            if error.retryable and not deadline.over:
                time.sleep(POLL_S)
                continue
        break
    if done is not None:
        done.set()


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
