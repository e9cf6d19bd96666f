"""`shardkeep tune`: searches the settings of a job by trials, several at once, and keeps the best model.

OUT/            with trials by number as jobs (launch/out_folder.py)
  journal.log   the trials, as Optuna keeps them (search.py)
  best.yaml     the best job so far; it trains as it stands
  report.html   report.py
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path

from optuna.trial import FrozenTrial, Trial
from rich.console import Console

from shardkeep.automl.tune.plan import Plan
from shardkeep.automl.tune.prepare import for_this_machine, opened
from shardkeep.automl.tune.report import outcome_text, write_report
from shardkeep.automl.tune.search import CAUSE, Search
from shardkeep.automl.tune.trial_run import TrialRun
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError, JobError, JobStopped, UserError, first_line
from shardkeep.base.files import atomic_write
from shardkeep.base.yaml_text import write_yaml
from shardkeep.launch.out_folder import holding
from shardkeep.launch.processes.starter import Starter, starting
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.test_data import score_test_data
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from shardkeep.view.run_view import clock_text
from shardkeep.view.screen import Screen

POLL_S = 0.05
HOPELESS = 3
"""When the first so many trials all fail, no other is tried."""


def tune(plan: Plan, *, out: Path, trials: int, minutes: float | None, console: Console) -> None:
    """Runs trials until there are `trials` in all, or this start has taken `minutes`. Blocks. The same call continues.

    Raises UserError (another search is in the folder, or no trial can start), JobStopped, JobError (no trial completed,
    or the test data could not be scored), OSError (a full disk)."""
    screen, deadline = Screen(console), Deadline(math.inf if minutes is None else 60.0 * minutes)
    several = plan.trial({}).model_copy(update={"servers": 1})  # processes, which are forked where they can be
    with starting(several, partial(screen.phase, "start")) as starter, Interrupts() as interrupts:
        try:
            plan = opened(plan, starter, screen)  # before there is a folder, as the data may refuse
            with holding(out, what="search"):
                search = Search(plan, out)
                if search.remark:
                    screen.phase("code", search.remark)
                screen.working("tune", "estimates what a trial needs", 0.0)
                plan, at_once, first = for_this_machine(plan)
                search.halve(first)
                screen.end_bar()
                trials = sum(1 for _ in itertools.islice(plan.combinations(), trials)) or trials  # no more differ
                many = f"{trials} trials" + (f", {done} of them done" if (done := len(search.ended)) else "")
                screen.phase("tune", f"{many}, {at_once} at once, by {plan.metric}: {', '.join(plan.space)}")
                interrupts.tolerated, interrupts.notice = 1_000_000, "stopping; the trials that ended are kept"
                tuning = _Tuning(plan, search, out, starter, screen)
                tuning.run(trials, at_once, deadline, interrupts)
                tuning.end(stopped=interrupts.count > 0)
        finally:
            screen.end_bar()


class _Tuning:
    """One start of a search."""

    def __init__(self, plan: Plan, search: Search, out: Path, starter: Starter, screen: Screen) -> None:
        self._plan, self._search, self._out, self._starter, self._screen = plan, search, out, starter, screen
        self._running: list[TrialRun] = []
        self._began, self._before = time.monotonic(), len(search.ended)

    def run(self, trials: int, at_once: int, deadline: Deadline, interrupts: Interrupts) -> None:
        """Runs trials, `at_once` side by side. Those that run when the time is over stop early."""
        self._keep_best()
        self._screen.working("tune", f"{self._before} of {trials} trials", self._before / trials)
        try:
            while not (interrupts.count or deadline.over):
                while len(self._running) < at_once and len(self._search.ended) + len(self._running) < trials:
                    self._start()
                if not self._running:
                    break
                time.sleep(POLL_S)
                for each in filter(self._has_ended, tuple(self._running)):
                    self._running.remove(each)
                    self._keep_best()
                    self._show(each.trial.number, trials, deadline)
        finally:
            for each in self._running:
                each.child.kill()
        for each in self._running if not interrupts.count else ():
            self._search.end(each.trial)
        self._running.clear()
        self._keep_best()

    def end(self, *, stopped: bool) -> None:
        """Scores the test data with the best model, once, and writes the report. `stopped`: by somebody."""
        best, report = self._search.best, self._out / "report.html"
        line = "" if best is None or stopped else self._scored(best)
        write_report(self._search, report, line)
        if stopped:
            raise JobStopped(f"stopped after {len(self._search.ended)} trials; the same command continues")
        if best is None:
            raise JobError(f"no trial completed; {report} has what became of each")
        self._screen.end_bar()
        self._screen.phase("best", line)
        self._screen.phase("report", str(report))

    def _start(self) -> None:
        trial = self._search.ask()
        try:
            self._running.append(TrialRun(self._plan, trial, self._out, self._starter))
        except ConfigError as error:
            self._fail(trial, first_line(error))

    def _has_ended(self, run: TrialRun) -> bool:
        """Looks at a trial, and ends it if others beat it by far."""
        running = run.child.running  # before its last evaluation is read
        if (loses := run.loses()) or not running:
            value, cause = (None, "") if loses else run.outcome()
            run.child.kill()
            self._fail(run.trial, cause) if cause else self._search.end(run.trial, value)
            return True
        return False

    def _fail(self, trial: Trial, cause: str) -> None:
        if os.strerror(errno.ENOSPC) in cause:  # not by its settings; it runs again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._out))
        self._search.end(trial, cause=cause)
        if len(ended := self._search.ended) >= HOPELESS and all(CAUSE in each.user_attrs for each in ended):
            raise UserError(f"none of the first {len(ended)} trials completed: {cause}")

    def _keep_best(self) -> None:
        """Writes best.yaml, and deletes the checkpoints of all trials except the best one and those that run."""
        kept = {str(each.trial.number) for each in self._running}
        if (best := self._search.best) is not None:
            kept.add(str(best.number))
            head = f"# Trial {best.number} of shardkeep tune: {self._plan.metric} {best.value:.5f}\n"
            job = self._plan.chosen(best.params).model_dump(mode="json", exclude_unset=True)
            atomic_write(self._out / "best.yaml", head + write_yaml(job, sort_keys=False))
        for run in (self._out / "runs").iterdir():
            for name in ("checkpoints", "recovery") if run.name not in kept else ():
                shutil.rmtree(run / name, ignore_errors=True)

    def _show(self, number: int, trials: int, deadline: Deadline) -> None:
        """What became of a trial, as a line; of all, as the bar."""
        ended, best = self._search.ended, self._search.best
        trial = next(each for each in ended if each.number == number)
        pace_s = (time.monotonic() - self._began) / (len(ended) - self._before)
        left_s = min(deadline.remaining_s, pace_s * (trials - len(ended)))
        score = "none yet" if best is None else f"{best.value:.5f} (trial {best.number})"
        text = f"{len(ended)} of {trials} trials, best {score}"
        self._screen.phase("trial", f"{number}: {outcome_text(trial)}; {text}, {clock_text(left_s)} left")
        self._screen.working("tune", text, len(ended) / trials, left_s)

    def _scored(self, best: FrozenTrial) -> str:
        """The line on the best trial, whose model has read the test data by then, once."""
        run, config = self._out / f"runs/{best.number}", self._plan.chosen(best.params)
        folder = RunFolder(run)
        summary = folder.last_summary() or {}
        if "test" not in summary:
            self._screen.working("tune", f"trial {best.number} reads the test data", 1.0)
            atomic_write(folder.config_path, config.to_yaml())  # the trial's own leaves the test data unread
            ready = {"status": "completed", "message": ""}  # also where an earlier try could not read the data
            summary = score_test_data(
                config, folder, summary | ready if "message" not in summary else folder.amend(ready)
            )
        if summary["status"] != "completed":
            raise JobError(summary["message"])
        test = (summary.get("test") or {}).get(self._plan.metric)
        others = [each.name for each in run.parent.iterdir() if each.name != run.name and _has_read_test(each)]
        before = f"trial {' and '.join(sorted(others))} has read before" if others else "no other trial has read"
        read = "" if test is None else f", {test:.5f} on the test data, which {before}"
        text = f"trial {best.number}: {self._plan.metric} {best.value:.5f} on the evaluation data{read}"
        return f"{text}; {self._out / 'best.yaml'} trains it, {run} has the model"


def _has_read_test(run: Path) -> bool:
    """Whether it was the best of an earlier start."""
    return "test" in (RunReader(run).last_summary() or {})
