"""Runs the trials of an experiment, several at once: each is `shardkeep train`, forked by the launcher's fork server.

OUT/               with trials by name as jobs (launch/out_folder.py)
  journal.jsonl    journal.py
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from shardkeep.assembly.kernel_needs import compile_of_job
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError, JobError, JobStopped, ShardkeepError
from shardkeep.base.plugging.modules import check_found, search_last
from shardkeep.config import JobConfig
from shardkeep.estimate.at_once import at_once
from shardkeep.experiments.journal import Ended, Journal
from shardkeep.experiments.plan import Trial
from shardkeep.launch.out_folder import holding, start_job
from shardkeep.launch.processes.children import Child, end_all
from shardkeep.launch.processes.starter import Starter, starting
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.records.lines import Tail
from shardkeep.records.training import Evaluation
from shardkeep.run.origin.code import code_of
from shardkeep.run.reader import RunReader
from shardkeep.view.run_view import clock_text
from shardkeep.view.screen import Screen
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data

POLL_S, STOP_S = 0.05, 10.0
"""Seconds between two looks at the trials, and those that they get to end when the experiment stops."""
HOPELESS = 3
"""When the first so many trials all fail, no other is tried."""


class Experiment(Protocol):
    """Chooses trials and judges them. `jobs` need all that trials need, and share the data of the first; `facts` decide
    the results of trials, by kind, apart from the data. `best_counts`: a trial counts with its best evaluation, if that
    was kept, and not with its last. `total`: the number of its trials; `done`: of those that ended."""

    name: str
    out: Path
    code_folder: Path
    jobs: Sequence[JobConfig]
    facts: Mapping[str, Any]
    metric: str
    best_counts: bool
    total: int

    @property
    def done(self) -> int: ...

    def begin(self, journal: Journal) -> JobConfig:
        """Begins or continues. Returns the job of most trials from now on."""

    def ask(self) -> Trial | Ended | None:
        """The next trial to start; one that cannot start, with its cause; None = there is none now."""

    def loses(self, trial: str, values: Sequence[float]) -> bool:
        """Takes the newest of a trial's values of the metric. Whether it is to stop early."""

    def end(self, ended: Ended) -> str:
        """Takes the end of a trial. Returns what the screen shows of it."""

    def conclude(self, screen: Screen, failure: ShardkeepError | None) -> None:
        """Writes the results. Raises `failure`, which ended the experiment early, or JobError."""


def run(
    experiment: Experiment,
    *,
    console: Console,
    jobs: int | None = None,
    minutes: float | None = None,
    starter: Starter | None = None,
) -> None:
    """Runs an experiment to its end; the same call continues it. `jobs`: trials at once, None = as the machine allows.
    After `minutes` the trials that run count as stopped early. `starter`: of trials, None = the launcher's fork server.

    Raises UserError (the folder has another experiment), JobStopped, JobError, and OSError."""
    screen, deadline = Screen(console), Deadline(math.inf if minutes is None else 60.0 * minutes)
    job = experiment.jobs[0]
    several = job.model_copy(update={"servers": job.servers or 1})  # processes, which are forked if possible
    forking = starting(several, partial(screen.phase, "start")) if starter is None else nullcontext(starter)
    with forking as start, Interrupts() as interrupts:
        try:
            data = _open(experiment, start, screen)  # before there is a folder, as the data may refuse
            with holding(experiment.out, what=experiment.name):
                journal = Journal(experiment.out)
                own = {"name": {"experiment": experiment.name}, "data": {"fingerprint of the data": data.fingerprint}}
                journal.hold_to({**own, **experiment.facts})
                journal.await_orphans()
                usual = experiment.begin(journal)
                most = jobs or (at_once(usual) if experiment.done < experiment.total else 1)
                done = f", {experiment.done} of them done" if experiment.done else ""
                text = f"{experiment.total} trials into {experiment.out}{done}, {most} at once, by {experiment.metric}"
                screen.phase(experiment.name, text)
                interrupts.tolerated, interrupts.notice = 1_000_000, "stopping; the trials that ended are kept"
                failure = _Runner(experiment, journal, start, screen, interrupts, deadline).run(most)
                experiment.conclude(screen, failure)
        finally:
            screen.end_bar()


def _open(experiment: Experiment, starter: Starter, screen: Screen) -> Data:
    """Compiles kernels and converts the data, once for all trials."""
    job, say = experiment.jobs[0], partial(screen.phase, "kernels")
    for each in experiment.jobs:
        check_found(each.own_modules, (experiment.code_folder, each.data.root))
    if job.own_modules:
        search_last(experiment.code_folder)
    starter.load(list(dict.fromkeys(kernel for each in experiment.jobs for kernel in compile_of_job(each, say))))
    data = open_data(job.data, seed=job.seed, progress=partial(screen.working, "data"), items=job.items)
    screen.end_bar()
    if data.eval is None:
        raise ConfigError("the job has no evaluation data, by which trials are compared; allowed: data.split, or eval")
    screen.phase("data", data.describe())
    return data


@dataclass
class _Running:
    trial: Trial
    child: Child
    tail: Tail
    began: float
    values: list[float] = field(default_factory=list)
    loses: bool = False

    def ended(self, state: Literal["completed", "stopped", "failed"], **others: Any) -> Ended:
        seconds = round(time.monotonic() - self.began, 3)
        return Ended(self.trial.name, state, dict(self.trial.settings), values=self.values, seconds=seconds, **others)


@dataclass
class _Runner:
    """One start of an experiment."""

    experiment: Experiment
    journal: Journal
    starter: Starter
    screen: Screen
    interrupts: Interrupts
    deadline: Deadline
    failed: list[Ended] = field(default_factory=list)

    def run(self, most: int) -> ShardkeepError | None:
        """Runs trials, `most` at once, until all have ended or the time is over. Returns why it ended earlier."""
        running, number = list[_Running](), 0
        before, began = self.experiment.done, time.monotonic()
        try:
            while not (self.interrupts.count or self.deadline.over or self._hopeless()):
                while len(running) < most and (trial := self.experiment.ask()) is not None:
                    if isinstance(trial, Ended):
                        self._end(trial)
                    else:
                        running.append(self._start(trial, number := number + 1))
                if not running:
                    break
                time.sleep(POLL_S)
                for each in tuple(running):
                    if (ended := self._look(each)) is not None:
                        running.remove(each)
                        text, done = self._end(ended), self.experiment.done
                        pace_s = (time.monotonic() - began) / (done - before)
                        left_s = min(self.deadline.remaining_s, pace_s * (self.experiment.total - done))
                        text = f"{ended.trial}: {text}; {done} of {self.experiment.total} trials"
                        self.screen.phase("trial", f"{text}, {clock_text(left_s)} left")
                        self.screen.working("trials", text, done / self.experiment.total, left_s)
        finally:
            end_all([each.child for each in running], grace_s=STOP_S)
        if self.interrupts.count:
            text = f"stopped with {self.experiment.done} of {self.experiment.total} trials done"
            return JobStopped(f"{text}; the same command continues")
        for each in running:
            self._end(each.ended("stopped"))
        return self._hopeless()

    def _start(self, trial: Trial, number: int) -> _Running:
        out, code_folder = self.experiment.out, self.experiment.code_folder
        while not (self.starter.ready(POLL_S) or self.interrupts.count):
            pass
        child = start_job(self.starter, out, trial.name, trial.config, code_folder, number=number)
        self.journal.begin(trial.name, trial.settings, child.pid)
        return _Running(trial, child, Tail(out / f"runs/{trial.name}/metrics.jsonl"), time.monotonic())

    def _look(self, each: _Running) -> Ended | None:
        """Reads the new evaluations of a trial, and stops it if others beat it. What became of it; None = it runs."""
        alive = each.child.running  # before its last evaluation is read
        for record in each.tail:
            if isinstance(record, Evaluation) and (value := record.metrics.get(self.experiment.metric)) is not None:
                each.values.append(value)
                if not each.loses and self.experiment.loses(each.trial.name, each.values):
                    each.loses = True
                    each.child.terminate()
        if alive:
            return None
        run, death = RunReader(self.experiment.out / f"runs/{each.trial.name}"), each.child.death()
        each.child.kill()  # and what it left
        if each.loses:
            return each.ended("stopped")
        summary = run.last_summary() or {}
        scores = (self.experiment.best_counts and summary.get("best")) or summary.get("eval") or {}
        now = code_of(each.trial.config, self.experiment.code_folder)
        value = scores.get(self.experiment.metric)
        if summary.get("status") == "completed" and value is not None and math.isfinite(value):
            if (other := next((name for name in now if run.code.get(name) != now[name]), None)) is None:
                return each.ended("completed", value=value)
            return each.ended("failed", cause=f"another {other} than at the start of the experiment")
        how = "" if death is None else death.last_words or death.how()
        notes = [text for key, text in scores.items() if key.partition("/")[0] == "note"]
        cause = str(summary.get("message") or next(iter(notes), how))
        if os.strerror(errno.ENOSPC) in cause:  # not by its settings; it runs again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.experiment.out))
        return each.ended("failed", cause=cause)

    def _end(self, ended: Ended) -> str:
        self.journal.end(ended)
        self.failed += [ended] if ended.state == "failed" else []
        return self.experiment.end(ended)

    def _hopeless(self) -> ShardkeepError | None:
        if len(self.failed) < HOPELESS or any(each.state != "failed" for each in self.journal.ended.values()):
            return None
        last = self.failed[-1]
        return JobError(f"none of the first {len(self.failed)} trials completed: {last.trial}: {last.cause}")
