"""The plan of a search: the job, what is set over it for all trials, and the config of each trial. Runs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, IntDistribution

from shardkeep.automl.tune.space import DEFAULTS, Values, space_of, text_of
from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.versions import commit, versions
from shardkeep.config import JobConfig, load_config
from shardkeep.run.origin.code import PACKAGE, code_of
from shardkeep.workers.config import sign_of

REDUCTION = 3
"""Of the trials with 1, 3, 9, ... times as many evaluations as at the first look, one in so many goes on (Li et al.,
MLSys 2020)."""
IN_TRIALS = ("web.page=off", "web.metrics=off", "launch.affinity=none")
"""What trials have besides: they leave the test data unread, and several run on one machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A search over a job's settings. `overrides`: over the file in all trials. `grid`: tries every combination.
    `data`: the fingerprint of the samples, once they are open."""

    path: Path
    overrides: tuple[str, ...]
    space: Mapping[str, Values]
    job: JobConfig
    grid: bool = False
    data: str = ""

    @property
    def metric(self) -> str:
        """By what trials are compared: that of `train.early_stopping`, else the first metric of an evaluation."""
        stopping = self.job.train.early_stopping
        return stopping.metric if stopping else next(name for name in self.job.evaluated if sign_of(name) is not None)

    @property
    def sign(self) -> int:
        """1 = more of the metric is better, -1 = less."""
        return sign_of(self.metric) or 1

    @property
    def code_folder(self) -> Path:
        """Where the user's own modules are."""
        return self.path.resolve().parent

    def load(self, *overrides: str) -> JobConfig:
        """The job with more overrides. Raises ConfigError."""
        return load_config(self.path, [*self.overrides, *overrides])

    def over(self, *overrides: str) -> Plan:
        """With more that is set for all trials. Raises ConfigError."""
        return replace(self, overrides=(*self.overrides, *overrides), job=self.load(*overrides))

    def chosen(self, params: Mapping[str, Any], *besides: str) -> JobConfig:
        """The job with the settings of a trial. Raises ConfigError where they do not go together."""
        return self.load(*(f"{key}={value}" for key, value in params.items()), *besides).with_effect()

    def trial(self, params: Mapping[str, Any]) -> JobConfig:
        """The same as a trial runs it."""
        job = self.job
        where = {
            "threads=1": job.threads == "auto",
            "eval.test=false": job.tested,
            "checkpoint.keep=1": job.checkpoint.on,
        }
        return self.chosen(params, *IN_TRIALS, *(setting for setting, has_effect in where.items() if has_effect))

    def first_look(self, steps: int) -> int:
        """After how many evaluations a trial of so many steps may stop early: those of an epoch, as its beginning
        favours high rates, or a ninth of all."""
        every, epochs = self.job.eval.every_steps, self.job.train.epochs
        evaluations = epochs if every == "epoch" else steps // every
        return max(1, min(evaluations // epochs, evaluations // REDUCTION**2))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """All settings that trials can have; none where a range of fractions has no end of them."""
        lists: list[Iterable[Any]] = [
            each.choices if isinstance(each, CategoricalDistribution)
            else range(each.low, each.high + 1) if isinstance(each, IntDistribution) else ()
            for each in self.space.values()
        ]  # fmt: skip
        return (dict(zip(self.space, point, strict=True)) for point in itertools.product(*lists))

    def first(self) -> list[dict[str, Any]]:
        """The settings of the first trials: those of the job as it stands as far as they are in the space, or all."""
        if self.grid:
            return list(self.combinations())
        known = self.job.all_settings()
        return [{key: own for key, values in self.space.items() if (own := _own(values, known.get(key))) is not None}]

    def facts(self) -> dict[str, Any]:
        """What decides the results of trials besides the code of shardkeep, apart from the job."""
        searched = {f"--over {key}": str(values) for key, values in self.space.items()}
        own = {f"code of {name}": digest for name, digest in self._code.items() if name != PACKAGE}
        return searched | own | {"fingerprint of the data": self.data}

    @property
    def library(self) -> str:
        """The code of shardkeep, for a person."""
        return f"{commit() or versions()[PACKAGE]} (sources {self._code[PACKAGE][:8]})"

    @property
    def _code(self) -> Mapping[str, str]:
        return code_of(self.job, self.code_folder)


def _own(values: Values, value: Any) -> Any:
    """A value as trials have it; None = it is none of the values."""
    if isinstance(values, CategoricalDistribution):
        return text if (text := text_of(value)) in values.choices else None
    return value if isinstance(value, int | float) and values.low <= value <= values.high else None


def plan_of(path: Path, overrides: Sequence[str], over: Sequence[str], *, grid: bool = False) -> Plan:
    """Reads the job and what to search. Raises ConfigError."""
    plan = Plan(path, tuple(overrides), {}, load_config(path, overrides), grid)
    if plan.job.checkpoint.dir is not None:
        raise ConfigError("checkpoint.dir: all trials would share it; leave it out, each trial has a folder of its own")
    return replace(plan, space=space_of(plan.load, over, defaults=() if grid else DEFAULTS))
