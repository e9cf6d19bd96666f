"""A trial that runs: a job of its own in a process of its own, and what it says of itself."""

from __future__ import annotations

import math
import os
from pathlib import Path

from optuna.trial import Trial

from shardkeep.automl.tune.plan import Plan
from shardkeep.core_plan import worker_threads
from shardkeep.launch.out_folder import job_arguments
from shardkeep.launch.processes.children import child_environment
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.records.lines import Tail
from shardkeep.records.training import Evaluation
from shardkeep.run.reader import RunReader


class TrialRun:
    """Starts trial N by `shardkeep train jobs/N.yaml`. Raises ConfigError: its settings do not go together; OSError."""

    def __init__(self, plan: Plan, trial: Trial, out: Path, starter: Starter) -> None:
        self.trial, self.run, self._plan = trial, out / f"runs/{trial.number}", plan
        self._values: list[float] = []
        config, log = plan.trial(trial.params), out / f"logs/{trial.number}.log"
        words = job_arguments(out, str(trial.number), config, plan.code_folder)
        env = child_environment(os.environ, threads=worker_threads(config))
        self.child = starter.start(RoleCommand("train", trial.number, words, log, env))
        self._tail = Tail(self.run / "metrics.jsonl")

    def loses(self) -> bool:
        """Reports new evaluations, each as it counts if it is the last. Whether others beat the trial by far."""
        for record in self._tail:
            if isinstance(record, Evaluation) and (value := record.metrics.get(self._plan.metric)) is not None:
                self._values.append(value)
                best = max(self._values, key=lambda each: self._plan.sign * each)
                stops = self._plan.job.train.early_stopping is not None
                self.trial.report(best if stops else value, len(self._values))
                if self.trial.should_prune():
                    return True
        return False

    def outcome(self) -> tuple[float | None, str]:
        """Of a trial that has ended: the metric of its model, or why there is none."""
        death, summary = self.child.death(), RunReader(self.run).last_summary() or {}
        scores = summary.get("best") or summary.get("eval") or {}
        value = scores.get(self._plan.metric)
        if summary.get("status") == "completed" and value is not None and math.isfinite(value):
            return value, ""
        how = "" if death is None else death.last_words or death.how()
        return None, str(summary.get("message") or scores.get("note") or how)
