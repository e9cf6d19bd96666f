"""What `shardkeep tune` searches: the keys of a job with their values, from `--over` and from what suits a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from shardkeep.base.errors import ConfigError, first_line
from shardkeep.config import JobConfig
from shardkeep.config.over import Range, Values, read_over, text_of

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


def space_of(
    load: Callable[..., JobConfig], over: Sequence[str], *, grid: bool = False, defaults: Sequence[str] = DEFAULTS
) -> dict[str, Values]:
    """The keys to search; those of a grid have lists, and no defaults. `load`: the job with overrides. Raises
    ConfigError: `--over` names no key of the job, or a value that it cannot have."""
    own, job = read_over(over, lists="--grid" if grid else ""), load()
    if grid and not own:
        raise ConfigError("--grid: has nothing to combine; allowed: with --over KEY=A,B,C")
    named = own.get("model.name")
    models = named if isinstance(named, tuple) else [job.model.name]
    for text in over:
        key = text.partition("=")[0]
        if problem := _problem(load, key, own[key], models):
            raise ConfigError(f"--over {text}: {problem}")
    known = job.all_settings()
    default = {
        key: _with(values, known.get(key))
        for key, values in read_over(() if grid else defaults).items()
        if key not in own
    }
    return own | {key: values for key, values in default.items() if not _problem(load, key, values, models)}


def _with(values: Values, own: Any) -> Values:
    """The values and the job's own."""
    if isinstance(values, tuple):
        return tuple(dict.fromkeys([text_of(own), *values]))
    return Range(min(values.low, own), max(values.high, own), values.log) if isinstance(own, int | float) else values


def own_value(values: Values, value: Any) -> Any:
    """A value as trials have it; None = it is none of the values."""
    if isinstance(values, tuple):
        return text if (text := text_of(value)) in values else None
    return value if isinstance(value, int | float) and values.low <= value <= values.high else None


def _problem(load: Callable[..., JobConfig], key: str, values: Values, models: Sequence[Any]) -> str:
    """Why the job cannot have one of the values with one of the models; "" = it can have all. `load`: the job with
    overrides."""
    ends = (values.low, values.high) if isinstance(values, Range) else values
    for model, value in itertools.product(models, ends):
        try:
            load(*([] if key == "model.name" else [f"model.name={model}"]), f"{key}={value}")
        except ConfigError as error:
            return first_line(error).rpartition("--set ")[2].partition(": ")[2]
    return ""
