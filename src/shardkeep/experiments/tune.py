"""`shardkeep tune`: searches the settings of a job by trials. Optuna draws them and stops bad ones early.

OUT/            see runner.py; besides report.html, plots/, trials.csv, trials.parquet
  best.yaml     the best job so far; it trains as it stands
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import TrialState, create_trial

from shardkeep.automl.space import own_value, space_of
from shardkeep.base.errors import ConfigError, JobError, ShardkeepError, first_line
from shardkeep.base.files import atomic_write
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, load_config
from shardkeep.config.over import Values, combinations, text_of
from shardkeep.estimate.at_once import beside_others
from shardkeep.experiments.journal import Ended, Journal, facts_of
from shardkeep.experiments.pictures import curves_of, write_pictures
from shardkeep.experiments.plan import Trial
from shardkeep.experiments.report import outcome_text, table_of, write_report
from shardkeep.experiments.results import write_table
from shardkeep.launch.test_data import score_once
from shardkeep.page.document import section
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from shardkeep.view.screen import Screen
from shardkeep.workers.config import sign_of

REDUCTION = 3
"""Of the trials with 1, 3, 9, ... times as many evaluations as at the first look, one in so many goes on (Li et al.,
MLSys 2020)."""
EVALUATIONS = 4
"""A trial has so many where the job has fewer, so that it can stop early."""


class SearchedJob:
    """The job of a search, and the keys that it searches. `overrides`: over the job's file, in all trials; `over`: as
    `--over`; `grid`: it tries every combination and nothing else. Raises ConfigError."""

    def __init__(self, path: Path, overrides: Sequence[str], over: Sequence[str], *, grid: bool) -> None:
        self.path, self.grid, self._overrides = path, grid, [*overrides]
        self.job = self.load()
        if self.job.checkpoint.dir is not None:
            raise ConfigError("checkpoint.dir: all trials would share it; leave it out, each has a folder of its own")
        self.space = space_of(self.load, over, grid=grid)
        stopping = self.job.train.early_stopping
        self.metric = stopping.metric if stopping else next(name for name in self.job.evaluated if sign_of(name))
        self.sign = sign_of(self.metric) or 1

    def load(self, *overrides: str) -> JobConfig:
        """The job with more overrides. Raises ConfigError."""
        return load_config(self.path, [*self._overrides, *overrides])

    def override(self, *overrides: str) -> None:
        """Sets more for all trials. Raises ConfigError."""
        self.job = self.load(*overrides)
        self._overrides += overrides

    def chosen(self, settings: Mapping[str, Any], *also: str) -> JobConfig:
        """The job with the settings of a trial. Raises ConfigError where they do not go together."""
        return self.load(*(f"{key}={value}" for key, value in settings.items()), *also).with_effect()

    def trial(self, settings: Mapping[str, Any]) -> JobConfig:
        """The same as a trial runs it, which leaves the test data unread."""
        also = ["eval.test=false"] * self.job.tested + ["checkpoint.keep=1"] * self.job.checkpoint.on
        return beside_others(self.chosen(settings, *also))

    @property
    def own(self) -> dict[str, Any]:
        """The settings of the job as it stands, as far as they are in the space."""
        known = self.job.all_settings()
        found = {key: own_value(values, known.get(key)) for key, values in self.space.items()}
        return {key: own for key, own in found.items() if own is not None}

    def first_look(self, steps: int) -> int:
        """After how many evaluations a trial of so many steps may stop early: those of an epoch, as its beginning
        favours high rates, or a ninth of all."""
        every, epochs = self.job.eval.every_steps, self.job.train.epochs
        evaluations = epochs if every == "epoch" else steps // every
        return max(1, min(evaluations // epochs, evaluations // REDUCTION**2))

    def counting(self, values: Sequence[float]) -> list[float]:
        """What each evaluation counts if it is the last: with early stopping the best so far."""
        better = max if self.sign > 0 else min
        return list(itertools.accumulate(values, better) if self.job.train.early_stopping else values)


class Study:
    """Optuna's study of the trials of a search. They stop early after `first_look` evaluations at the soonest; those of
    a grid go to their end. `drawn`: trials before, so that it does not draw the same again."""

    def __init__(self, searched: SearchedJob, first_look: int, drawn: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._searched, self.open = searched, dict[str, optuna.Trial]()
        halving = optuna.pruners.SuccessiveHalvingPruner(first_look, reduction_factor=REDUCTION)
        self.optuna = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=(searched.job.seed + drawn) % 2**32, constant_liar=True),
            pruner=optuna.pruners.NopPruner() if searched.grid else halving,
            direction="maximize" if searched.sign > 0 else "minimize",
        )

    def ask(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a new trial: Optuna draws what is not given, and what it draws again gives way to others."""
        had = [each.params for each in self.optuna.trials if each.state is not TrialState.FAIL]
        trial = self._ask(settings)
        if trial.params in had and (fresh := next((p for p in combinations(self._searched.space) if p not in had), {})):
            self.optuna.tell(trial, state=TrialState.FAIL)
            trial = self._ask(fresh)
        self.open[name] = trial
        return trial.params

    def _ask(self, settings: Mapping[str, Any]) -> optuna.Trial:
        if settings:
            self.optuna.enqueue_trial(dict(settings))
        return self.optuna.ask({key: _distribution(values) for key, values in self._searched.space.items()})

    def loses(self, trial: str, values: Sequence[float]) -> bool:
        """Takes the newest of its values of the metric."""
        self.open[trial].report(self._searched.counting(values)[-1], len(values))
        return self.open[trial].should_prune()

    def end(self, ended: Ended) -> None:
        """A trial that failed is worse than all others."""
        value = -math.inf * self._searched.sign if ended.state == "failed" else ended.value
        state = TrialState.PRUNED if ended.state == "stopped" else None
        self.optuna.tell(self.open.pop(ended.trial), value, state=state)

    def worth(self) -> list[dict[str, str]]:
        """What each setting is worth, as if all trials had completed: a stopped one with its last value."""
        every = optuna.create_study(direction=self.optuna.direction)
        for each in self.optuna.trials:
            if each.value is not None and math.isfinite(each.value):
                every.add_trial(create_trial(params=each.params, distributions=each.distributions, value=each.value))
        worth = get_param_importances(every, evaluator=PedAnovaImportanceEvaluator()) if len(every.trials) > 1 else {}
        return [{"setting": key, "share": f"{share:.0%}"} for key, share in worth.items()]


class Search:
    """A search by `trials` trials, or all of a grid. One that was running when its process was killed runs again."""

    name, best_counts = "tune", True

    def __init__(self, searched: SearchedJob, out: Path, trials: int) -> None:
        self.searched, self.out, self.code_folder = searched, out, searched.path.resolve().parent
        points = combinations(searched.space)
        ends = points if searched.grid else itertools.islice(points, trials)
        self.total = sum(1 for _ in ends) or trials  # no more differ
        known = {"over": {f"--over {key}": str(values) for key, values in searched.space.items()}}
        self.jobs: Sequence[JobConfig] = [searched.trial({})]
        self.facts: Mapping[str, Any] = facts_of(searched.job, self.code_folder) | known
        self.metric = searched.metric

    @property
    def done(self) -> int:
        return len(self._journal.ended)

    @property
    def best(self) -> Ended | None:
        """The best of the trials that completed, the earliest of equals."""
        completed = [each for each in self._journal.ended.values() if each.state == "completed"]
        return max(completed, key=lambda each: self.searched.sign * (each.value or 0.0), default=None)

    def begin(self, journal: Journal) -> JobConfig:
        from shardkeep.estimate.estimate import estimate  # after compiling: this import loads kernels

        job, every = self.searched.job, self.searched.job.eval.every_steps
        steps = estimate(job, gbit_per_s=1.0)["job"]["steps"]
        if (job.train.epochs if every == "epoch" else steps // every) < EVALUATIONS:
            self.searched.override(f"eval.every_steps={math.ceil(steps / EVALUATIONS)}")
        if job.servers:
            with contextlib.suppress(ConfigError):  # a setting that needs servers
                self.searched.override(
                    "servers=0", "workers=1", f"train.batch_size={job.train.batch_size * job.workers}"
                )
        self.open(journal, self.searched.first_look(steps))
        return self.searched.trial({})

    def open(self, journal: Journal, first_look: int = 1) -> None:
        """Continues with the trials of a journal, or begins with the job as it stands."""
        self._journal, begun, ended = journal, journal.begun, journal.ended.values()
        self.study = Study(self.searched, first_look, drawn=len(begun) + len(ended))
        for each in ended:
            self.study.ask(each.trial, each.settings)
            for at in range(len(each.values)):
                self.study.loses(each.trial, each.values[: at + 1])
            self.study.end(each)
        self._numbers = itertools.count(1 + max(map(int, [*begun, *journal.ended]), default=-1))
        self._queue = [(name, dict(each["settings"])) for name, each in begun.items()]
        known = [each.settings for each in ended] + [settings for _, settings in self._queue]
        first = combinations(self.searched.space) if self.searched.grid else [] if known else [self.searched.own]
        self._queue += [(str(next(self._numbers)), settings) for settings in first if settings not in known]

    def ask(self) -> Trial | Ended | None:
        if self.done + len(self.study.open) >= self.total:
            return None
        name, settings = self._queue.pop(0) if self._queue else (str(next(self._numbers)), {})
        settings = self.study.ask(name, settings)
        try:
            return Trial(name, self.searched.trial(settings), settings)
        except ConfigError as error:
            return Ended(name, "failed", settings, cause=first_line(error))

    def loses(self, trial: str, values: Sequence[float]) -> bool:
        return self.study.loses(trial, values)

    def end(self, ended: Ended) -> str:
        self.study.end(ended)
        self.keep_best()
        best = "none yet" if self.best is None else f"{self.best.value:.5f} (trial {self.best.trial})"
        return f"{outcome_text(ended)}; best {best}"

    def keep_best(self) -> None:
        """Writes best.yaml, and deletes the checkpoints of all trials except the best one and those that run."""
        kept = set(self.study.open)
        if (best := self.best) is not None:
            kept.add(best.trial)
            head = f"# Trial {best.trial} of shardkeep tune: {self.metric} {best.value:.5f}\n"
            job = self.searched.chosen(best.settings).model_dump(mode="json", exclude_unset=True)
            atomic_write(self.out / "best.yaml", head + write_yaml(job, sort_keys=False))
        for folder in (self.out / "runs").iterdir():
            for name in ("checkpoints", "recovery") if folder.name not in kept else ():
                shutil.rmtree(folder / name, ignore_errors=True)

    def conclude(self, screen: Screen, failure: ShardkeepError | None) -> None:
        """Scores the test data with the best model, once, and writes the table and the report."""
        screen.working("tune", "reads the test data", 1.0)
        self.keep_best()  # of a process that was killed before
        line = "" if failure or self.best is None else self._scored(self.best)
        self.write(line)
        screen.end_bar()
        if failure is not None:
            raise failure
        if self.best is None:
            raise JobError(f"no trial completed; {self.out / 'report.html'} has what became of each")
        screen.phase("best", line)
        screen.phase("report", f"{self.out / 'report.html'}; trials.csv and trials.parquet beside it")

    def write(self, line: str) -> None:
        """The table and the report of the trials, with `line` on the best one."""
        ended = self._journal.ended
        rows = [{"trial": name, self.metric: each.value, "outcome": outcome_text(each), "seconds": each.seconds,
                 **{key: text_of(each.settings.get(key, "")) for key in self.searched.space}}
                for name, each in ended.items()]  # fmt: skip
        write_table(rows, self.out, "trials")
        curves = {
            name: [list(enumerate(self.searched.counting(end.values), 1))] for name, end in ended.items() if end.values
        }
        words = "The metric of each trial by its evaluations, with early stopping the best so far. Short lines stopped."
        draw = (words, lambda: curves_of(curves, xlabel="evaluation", ylabel=self.metric))
        worth = "The share of each setting in what sets the best trials apart (PED-ANOVA, Watanabe et al., IJCAI 2023)."
        parts = [
            f'<p class="lead">{escape(line)}</p>',
            section("Settings", f"<p>{worth}</p>", table_of(self.study.worth())),
            *write_pictures({"curves": draw} if curves else {}, self.out),
            section("Trials", table_of(rows)),
        ]
        write_report(self.out, f"{self.searched.job.name}: tuned", parts)

    def _scored(self, best: Ended) -> str:
        """The line on the best trial, whose model has read the test data by then, once."""
        run = self.out / f"runs/{best.trial}"
        test = score_once(self.searched.chosen(best.settings), RunFolder(run)).get(self.metric)
        runs = [each for each in run.parent.iterdir() if each != run]
        others = sorted(each.name for each in runs if "test" in (RunReader(each).last_summary() or {}))
        before = f"trial {' and '.join(others)} has read before" if others else "no other trial has read"
        read = "" if test is None else f", {test:.5f} on the test data, which {before}"
        text = f"trial {best.trial}: {self.metric} {best.value:.5f} on the evaluation data{read}"
        return f"{text}; {self.out / 'best.yaml'} trains it, {run} has the model"


def _distribution(values: Values) -> BaseDistribution:
    if isinstance(values, tuple):
        return CategoricalDistribution(values)
    kind: Any = IntDistribution if values.whole else FloatDistribution
    return kind(values.low, values.high, log=values.log)  # type: ignore[no-any-return]
