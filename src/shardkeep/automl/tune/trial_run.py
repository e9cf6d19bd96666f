"""A trial that runs: a job of its own in a process of its own, what it says of itself, and what is left of it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from optuna.trial import Trial

from shardkeep.automl.tune.plan import Plan
from shardkeep.base.files import atomic_write
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.children import child_environment
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.records.lines import Tail
from shardkeep.records.training import Evaluation
from shardkeep.run.reader import RunReader


class TrialRun:
    """Starts the trial. Raises ConfigError where its settings do not go together, OSError.

    out/jobs/N.yaml is its config, out/runs/N its run folder, out/logs/N.log what it printed."""

    def __init__(self, plan: Plan, trial: Trial, out: Path, starter: Starter) -> None:
        self.trial, self.run, self.evaluations = trial, run_of(out, trial.number), 0
        config, job = plan.trial(trial.params), out / "jobs" / f"{trial.number}.yaml"
        atomic_write(job, config.to_yaml())
        code = ["--code", str(plan.code_folder)] if config.own_modules else []
        arguments = [str(job), "--run-dir", str(self.run), *code]
        environment = child_environment(os.environ, threads=worker_threads(config))
        log = out / "logs" / f"{trial.number}.log"
        self.child = starter.start(RoleCommand("train", trial.number, arguments, log, environment))
        self._tail = Tail(self.run / "metrics.jsonl")

    def values(self, metric: str) -> Iterator[tuple[int, float]]:
        """The evaluations since the last look: their numbers, from 1, and the metric."""
        for record in self._tail:
            if isinstance(record, Evaluation) and (value := record.metrics.get(metric)) is not None:
                self.evaluations += 1
                yield self.evaluations, value

    def outcome(self, metric: str) -> tuple[float | None, str]:
        """Of a trial that has ended: the metric of its model, or why there is none."""
        death, summary = self.child.death(), RunReader(self.run).last_summary() or {}
        scores = summary.get("best") or summary.get("eval") or {}
        value = scores.get(metric)
        if summary.get("status") == "completed" and value is not None and math.isfinite(value):
            return value, ""
        how = "" if death is None else death.last_words or death.how()
        return None, str(summary.get("message") or scores.get("note") or how)


def run_of(out: Path, number: int) -> Path:
    """The run folder of a trial."""
    return out / "runs" / str(number)


def tidy(out: Path, keep: Collection[int]) -> None:
    """Deletes the checkpoints of all trials except some, and what they kept for recovery. Raises OSError."""
    for run in (out / "runs").iterdir():
        if run.name not in map(str, keep):
            for name in ("checkpoints", "recovery"):
                shutil.rmtree(run / name, ignore_errors=True)
