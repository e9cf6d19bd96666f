"""`shardkeep tune`: searches the settings of a job by trials, several at once, and keeps the best model.

OUT/
  journal.log   the trials, as Optuna keeps them      search.py
  best.yaml     the best job so far, which trains as it stands
  runs/N jobs/N.yaml logs/N.log   trial N             trial_run.py
  report.html                                         report.py
"""

from __future__ import annotations

import errno
import math
import os
import time
from functools import partial
from pathlib import Path

from optuna.trial import FrozenTrial, Trial
from rich.console import Console

from shardkeep.automl.tune.plan import Plan, as_yaml
from shardkeep.automl.tune.prepare import prepare
from shardkeep.automl.tune.report import outcome_text, write_report
from shardkeep.automl.tune.search import CAUSE, Search
from shardkeep.automl.tune.space import job_s_own
from shardkeep.automl.tune.trial_run import TrialRun, run_of, tidy
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError, JobError, JobStopped, UserError, first_line
from shardkeep.base.files import atomic_write
from shardkeep.launch.out_folder import holding
from shardkeep.launch.processes.starter import Starter, starting
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.test_data import score_test_data
from shardkeep.run.folder import RunFolder
from shardkeep.view.run_view import clock_text
from shardkeep.view.screen import Screen

POLL_S = 0.05
HOPELESS = 3
"""When the first so many trials all fail, no other is tried."""


def tune(plan: Plan, *, out: Path, trials: int, minutes: float | None, console: Console) -> Path:
    """Runs trials until there are `trials` in all, or this start has taken `minutes`; blocks. The path of best.yaml.

    Raises:
        UserError: The folder has another search, or no trial can start.
        JobStopped: Somebody stopped it. The same call continues.
        JobError: No trial completed.
        OSError: The disk is full; what is done is kept.
    """
    screen = Screen(console)
    with (
        holding(out, "runs", "jobs", "logs", what="search"),
        starting(plan.trial({}).model_copy(update={"servers": 1}), partial(screen.phase, "start")) as starter,
        Interrupts() as interrupts,
    ):
        try:
            deadline = Deadline(math.inf if minutes is None else 60.0 * minutes)
            search = Search(out / "journal.log", plan.space, metric=plan.metric, seed=plan.job.seed)
            try:
                search.begin(plan.facts(), job_s_own(plan.job, plan.space))
            except UserError as error:
                raise UserError(f"--out {out}: {error}; give --out a new folder") from None
            plan, at_once = prepare(plan, starter, screen)
            interrupts.tolerated, interrupts.notice = 1_000_000, "stopping; the trials that ended are kept"
            screen.phase("tune", f"{trials} trials, {at_once} at once, by {plan.metric}: {', '.join(plan.space)}")
            tuning = _Tuning(plan, search, out, starter, screen)
            tuning.run(trials, at_once, deadline, interrupts)
            return tuning.end(f"{trials} trials" if interrupts.count else "")
        finally:
            screen.end_bar()


class _Tuning:
    """One start of a search."""

    def __init__(self, plan: Plan, search: Search, out: Path, starter: Starter, screen: Screen) -> None:
        self._plan, self._search, self._out, self._starter, self._screen = plan, search, out, starter, screen
        self._running: list[TrialRun] = []
        self._began, self._before = time.monotonic(), len(search.finished)

    def run(self, trials: int, at_once: int, deadline: Deadline, interrupts: Interrupts) -> None:
        """Runs trials, `at_once` of them side by side. Those that run when the time is over count as stopped early."""
        self._keep_best()
        try:
            while not (interrupts.count or deadline.over):
                while len(self._running) < at_once and len(self._search.finished) + len(self._running) < trials:
                    self._start()
                if not self._running:
                    return
                time.sleep(POLL_S)
                for each in [each for each in self._running if self._has_ended(each)]:
                    self._running.remove(each)
                    self._keep_best()
                    self._show(each, trials, deadline)
        finally:
            for each in self._running:
                each.child.kill()
                if deadline.over and not interrupts.count:
                    self._search.stopped(each.trial)
            self._running.clear()
            tidy(self._out, self._kept())

    def end(self, stopped: str) -> Path:
        """Scores the test data of the best model, once, and writes the report. `stopped`: by somebody, before that."""
        best, report = self._search.best, self._out / "report.html"
        lines = []
        if best is not None and not stopped:
            lines = self._scored(best)
        write_report(self._search, report, lines)
        self._screen.end_bar()
        if stopped:
            count = len(self._search.finished)
            raise JobStopped(f"stopped with {count} of {stopped} done; the same command continues")
        if best is None:
            raise JobError(f"--out {self._out}: no trial completed; {report} has the cause of each")
        for line in lines:
            self._screen.phase("best", line)
        self._screen.phase("report", str(report))
        return self._out / "best.yaml"

    def _start(self) -> None:
        trial = self._search.ask()
        try:
            self._running.append(TrialRun(self._plan, trial, self._out, self._starter))
        except ConfigError as error:
            self._fail(trial, first_line(error))

    def _has_ended(self, run: TrialRun) -> bool:
        """Looks at a trial, and ends one that others beat by far."""
        running = run.child.running  # before its last records are read
        for number, value in run.values(self._plan.metric):
            if self._search.loses(run.trial, number, value) and running:
                run.child.kill()
                self._search.stopped(run.trial)
                return True
        if running:
            return False
        value, cause = run.outcome(self._plan.metric)
        run.child.kill()  # closes its pipe
        if value is not None:
            self._search.completed(run.trial, value)
        else:
            self._fail(run.trial, cause)
        return True

    def _fail(self, trial: Trial, cause: str) -> None:
        if os.strerror(errno.ENOSPC) in cause:  # it says nothing about the settings; the trial runs again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._out))
        self._search.failed(trial, cause)
        ended = self._search.finished
        if len(ended) >= HOPELESS and all(CAUSE in each.user_attrs for each in ended):
            raise UserError(f"none of the first {len(ended)} trials completed: {cause}")

    def _kept(self) -> set[int]:
        """The trials whose checkpoints stay."""
        best = self._search.best
        return {each.trial.number for each in self._running} | ({best.number} if best is not None else set())

    def _keep_best(self) -> None:
        """Writes best.yaml, and leaves checkpoints of the best model alone."""
        if (best := self._search.best) is not None:
            head = f"Trial {best.number} of `shardkeep tune {self._plan.path}`: {self._plan.metric} {best.value:.5f}"
            text = as_yaml(self._plan.chosen(best.params), head)
            if not (path := self._out / "best.yaml").exists() or path.read_text(encoding="utf-8") != text:
                atomic_write(path, text)
        tidy(self._out, self._kept())

    def _show(self, run: TrialRun, trials: int, deadline: Deadline) -> None:
        """What became of a trial, as a line; of all, as the bar."""
        ended, best = self._search.finished, self._search.best
        trial = next(each for each in ended if each.number == run.trial.number)
        pace_s = (time.monotonic() - self._began) / (len(ended) - self._before)
        left_s = min(deadline.remaining_s, pace_s * (trials - len(ended)))
        score = "none yet" if best is None else f"{best.value:.5f} (trial {best.number})"
        text = f"{len(ended)} of {trials} trials, best {score}, {clock_text(left_s)} left"
        self._screen.phase("trial", f"{trial.number}: {outcome_text(trial)}; {text}")
        self._screen.working("tune", text, len(ended) / trials)

    def _scored(self, best: FrozenTrial) -> list[str]:
        """The lines on the best trial; its model has read the test data by then, once."""
        run, config = run_of(self._out, best.number), self._plan.chosen(best.params)
        folder = RunFolder(run)
        summary = folder.last_summary() or {}
        if "test" not in summary:
            atomic_write(folder.config_path, config.to_yaml())  # trials' own leaves the test data unread
            summary = score_test_data(config, folder, summary)
        test = (summary.get("test") or {}).get(self._plan.metric)
        read = "" if test is None else f", {test:.5f} on the test data, which no other trial has read"
        return [
            f"trial {best.number}: {self._plan.metric} {best.value:.5f} on the evaluation data{read}",
            f"{self._out / 'best.yaml'} trains it again; its model is in {run}",
        ]
