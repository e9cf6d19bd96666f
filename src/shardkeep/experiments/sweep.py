"""`shardkeep sweep`: bytes against AUC. Runs a job with several recipes or settings and seeds, and compares them.

OUT/                            see runner.py; besides report.html, plots/
  results.csv results.parquet   a line per trial
  summary.json                  figures per variant
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from shardkeep.base.errors import JobError, ShardkeepError
from shardkeep.config import JobConfig
from shardkeep.estimate.at_once import beside_others
from shardkeep.experiments.journal import Ended, Journal, facts_of
from shardkeep.experiments.pictures import sweep_pictures
from shardkeep.experiments.plan import SweepPlan, Trial
from shardkeep.experiments.report import outcome_text, table_of, write_report
from shardkeep.experiments.results import collect
from shardkeep.page.document import section
from shardkeep.run.reader import RunReader
from shardkeep.view.screen import Screen

RULES = (
    "Bytes: of training, with warm-up and headers, without evaluation. AUC, logloss and AUC loss: mean, standard "
    "deviation and 95 % interval. AUC loss: fp32's AUC less the recipe's with the same seed; above 0 it lost. p: "
    "two-sided, with Holm's correction over all recipes. Could have shown: such a loss shows in four of five sweeps."
)


class Sweep:
    """The trials of a plan, in its order. Results are written also where it is stopped or trials fail; the same sweep
    tries these again."""

    name, best_counts = "sweep", False  # the best of many evaluations would favour noisy recipes

    def __init__(self, plan: SweepPlan, out: Path) -> None:
        self.out, self.code_folder, self.metric, self._plan = out, plan.code_folder, plan.metric, plan
        self.jobs: Sequence[JobConfig] = [beside_others(trial.config) for trial in plan.trials[: len(plan.variants)]]
        variants = {f"variant {each.name}": {each.name: each.settings} for each in plan.variants}
        self.facts: Mapping[str, Any] = facts_of(plan.job, plan.code_folder) | variants
        self.total, self.done = len(plan.trials), 0
        self._left, self._failed = list(plan.trials), list[Ended]()

    def begin(self, journal: Journal) -> JobConfig:
        completed = {each.trial for each in journal.ended.values() if each.state == "completed"}
        runs = {name: RunReader(self.out / f"runs/{name}").last_summary() for name in completed}
        self._left = [trial for trial in self._plan.trials if not runs.get(trial.name)]  # or its folder is gone
        self.done = self.total - len(self._left)
        return self.jobs[0]

    def ask(self) -> Trial | None:
        trial = self._left.pop(0) if self._left else None
        return trial and replace(trial, config=beside_others(trial.config))

    def loses(self, trial: str, values: Sequence[float]) -> bool:
        return False

    def end(self, ended: Ended) -> str:
        self.done += 1
        self._failed += [ended] if ended.state == "failed" else []
        return outcome_text(ended)

    def conclude(self, screen: Screen, failure: ShardkeepError | None) -> None:
        results = collect(self._plan, self.out)
        results.write(self.out)
        command = shlex.join(["shardkeep", "sweep", str(self._plan.path), "--out", str(self.out)])
        left = [{"trial": row["run"], "status": row["status"], "message": row["message"]}
                for row in results.rows if row["status"] != "completed"]  # fmt: skip
        parts = [
            section("Not completed", table_of(left)) if left else "",
            section("Recipes", table_of([vars(each) for each in results.figures]), f"<p>{RULES}</p>"),
            *sweep_pictures(results, self.out),
            section("How it was made", table_of([{"command": command, **results.origin}])),
            section("The job", f"<pre>{escape(self._plan.job.to_yaml())}</pre>"),
        ]
        if words := write_report(self.out, f"{self._plan.path.stem}: bytes against AUC", parts):
            screen.phase("report", words)
        screen.phase("report", f"{self.out / 'report.html'}; results.csv, results.parquet, summary.json beside it")
        if failure is not None:
            raise failure
        if self._failed:
            names = "; ".join(f"{each.trial}: {each.cause}" for each in self._failed[:3])
            text = f"{len(self._failed)} of {self.total} trials failed ({names})"
            raise JobError(f"{text}; the same command tries them again")
