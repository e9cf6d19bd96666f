"""What `shardkeep tune` searches: keys of the job with their values, from `--over` and from what suits a model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from shardkeep.base.errors import ConfigError, first_line
from shardkeep.base.yaml_text import YamlError, read_yaml
from shardkeep.config import JobConfig

Values = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of a key. Those of a CategoricalDistribution are texts of YAML, as a shell has them."""
_RANGE = re.compile(r"(log:)?([^\s,\[\]]+?)\.\.([^\s,\[\]]+)")
DEFAULTS = (
    "tables.default.optimizer.lr=log:1e-3..0.3",
    "tower.optimizer.lr=log:3e-4..1e-2",
    "tower.optimizer.weight_decay=0,1e-6,1e-5,1e-4",
    "tables.default.optimizer.weight_decay=1e-6,1e-5,1e-4,1e-3,1e-2",
    "tables.default.init.scale=null,0.001,0.01",
    "tables.default.dim=8,16,32",
    "model.hidden=[128,64],[256,128],[400,400,400]",
    "model.dropout=0,0.1,0.2,0.4",
    "model.norm=none,batch",
    "model.init=dlrm,xavier_normal",
    "model.layers=1..3",
    "model.cross_layers=1..4",
    "model.attention.layers=1..3",
    "model.experts=4,8",
)
"""Searched beside the job's own values where the job has the key and `--over` does not name it."""


def space_of(load: Callable[..., JobConfig], over: Sequence[str], *, defaults: Sequence[str]) -> dict[str, Values]:
    """The keys to search, without `defaults` lists alone. `load`: the job with overrides. Raises ConfigError: `--over`
    names no key of the job, or a value that it cannot have."""
    own, job = dict(map(_parsed, over)), load()
    named = own.get("model.name")
    models = named.choices if isinstance(named, CategoricalDistribution) else [job.model.name]
    for text, (key, values) in zip(over, map(_parsed, over), strict=True):
        if problem := "names a key twice" if own[key] != values else _problem(load, key, values, models):
            raise ConfigError(f"--over {text}: {problem}")
        if not (defaults or isinstance(values, CategoricalDistribution)):
            raise ConfigError(f"--over {text}: has no end of values for --grid; allowed: KEY=A,B,C")
    if not (defaults or own):
        raise ConfigError("--grid: has nothing to combine; allowed: with --over KEY=A,B,C")
    known = job.all_settings()
    default = {key: _with(values, known.get(key)) for key, values in map(_parsed, defaults) if key not in own}
    return own | {key: values for key, values in default.items() if not _problem(load, key, values, models)}


def text_of(value: Any) -> str:
    """A value as a shell has it."""
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value)


def _parsed(text: str) -> tuple[str, Values]:
    """The key and the values of KEY=VALUES. Raises ConfigError."""
    key, _, values = text.partition("=")
    try:
        if not (key and values):
            raise ValueError("is not of the form KEY=A,B,C, KEY=LOW..HIGH or KEY=log:LOW..HIGH")
        if (found := _RANGE.fullmatch(values)) is None:
            return key, CategoricalDistribution(list(dict.fromkeys(map(text_of, read_yaml(f"[{values}]")))))
        log, *ends = found.groups()
        low, high = map(float, ends)
        if low > high or (log and low <= 0.0):
            raise ValueError("allowed: LOW up to HIGH, and with log: above 0")
        if all(end.lstrip("+-").isdecimal() for end in ends):
            return key, IntDistribution(int(low), int(high), log=bool(log))
        return key, FloatDistribution(low, high, log=bool(log))
    except (ValueError, YamlError) as error:
        raise ConfigError(f"--over {text}: {error}") from error


def _with(values: Values, own: Any) -> Values:
    """The values and the job's own."""
    if isinstance(values, CategoricalDistribution):
        return CategoricalDistribution(list(dict.fromkeys([text_of(own), *values.choices])))
    if not isinstance(own, int | float):
        return values
    return type(values)(min(values.low, own), max(values.high, own), log=values.log)  # type: ignore[arg-type]


def _problem(load: Callable[..., JobConfig], key: str, values: Values, models: Sequence[Any]) -> str:
    """Why the job cannot have one of the values with one of the models; "" = it can have all."""
    ends = values.choices if isinstance(values, CategoricalDistribution) else (values.low, values.high)
    for model, value in itertools.product(models, ends):
        try:
            load(*([] if key == "model.name" else [f"model.name={model}"]), f"{key}={value}")
        except ConfigError as error:
            return first_line(error).rpartition("--set ")[2].partition(": ")[2]
    return ""
