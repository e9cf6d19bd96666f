"""The plan of a search: the job, what is set over it for all trials, and the config of each trial. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkeep.automl.tune.space import Values, as_shown, space_of
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, load_config
from shardkeep.config_files.overrides import flat
from shardkeep.run.origin.code import code_of
from shardkeep.workers.config import sign_of

IN_TRIALS = (
    "eval.test=false",
    "web.page=off",
    "web.metrics=off",
    "launch.affinity=none",
    "checkpoint.keep=1",
)
"""What trials have besides: they leave the test data unread, and several run at once on one machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A search over the settings of one job."""

    path: Path
    overrides: tuple[str, ...]
    """KEY=VALUE over the file, for all trials and for what comes out."""
    job: JobConfig
    space: Mapping[str, Values]

    @property
    def metric(self) -> str:
        """By what trials are compared: that of `train.early_stopping`, else the first metric of an evaluation."""
        if self.job.train.early_stopping is not None:
            return self.job.train.early_stopping.metric
        return next(name for name in self.job.evaluated if sign_of(name) is not None)

    @property
    def code_folder(self) -> Path:
        """Where the user's own modules are."""
        return self.path.resolve().parent

    def over(self, *overrides: str) -> Plan:
        """With more that is set for all trials. Raises ConfigError."""
        return replace(self, overrides=(*self.overrides, *overrides), job=self.load(*overrides))

    def load(self, *overrides: str) -> JobConfig:
        """The job with more overrides. Raises ConfigError."""
        return load_config(self.path, [*self.overrides, *overrides])

    def chosen(self, params: Mapping[str, Any]) -> JobConfig:
        """The job with the settings of a trial. Raises ConfigError: they do not go together."""
        return self.load(*(f"{key}={value}" for key, value in params.items()))

    def trial(self, params: Mapping[str, Any]) -> JobConfig:
        """The same as a trial runs it."""
        threads = ["threads=1"] if self.job.threads == "auto" else []
        return self.load(*(f"{key}={value}" for key, value in params.items()), *IN_TRIALS, *threads)

    def facts(self) -> dict[str, Any]:
        """By what a search that continues knows its own trials: all settings, what is searched, and the code."""
        searched = {f"--over {key}": as_shown(values) for key, values in self.space.items()}
        code = {f"code of {name}": digest for name, digest in code_of(self.job, self.code_folder).items()}
        return flat(self.job.model_dump(mode="json")) | searched | code


def plan_of(path: Path, overrides: list[str], over: list[str]) -> Plan:
    """Reads the job and what to search. Raises ConfigError: one line."""
    space = space_of(lambda more: load_config(path, [*overrides, *more]), over)
    return Plan(path, tuple(overrides), load_config(path, overrides), space)


def as_yaml(job: JobConfig, head: str) -> str:
    """A config that trains as it stands, with `head` as its comment."""
    return f"# {head}\n{write_yaml(job.model_dump(mode='json', exclude_unset=True), sort_keys=False)}"
