"""What `shardkeep tune` searches: keys of the job with their values, from `--over` and from what suits a model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import YamlError, read_yaml
from shardkeep.config import JobConfig
from shardkeep.config_files.overrides import flat

Values = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of a key. Those of a CategoricalDistribution are texts of YAML, as a shell has them."""
Load = Callable[[Sequence[str]], JobConfig]
"""Reads the job with overrides KEY=VALUE. Raises ConfigError."""
FORMS = "allowed: KEY=A,B,C, or a range KEY=LOW..HIGH or KEY=log:LOW..HIGH"
_RANGE = re.compile(r"(log:)?\s*([^\s,.\[\]{}]*\.?[^\s,.\[\]{}]*)\.\.([^\s,\[\]{}]+)")
_WHOLE = re.compile(r"[-+]?[0-9]+")
ROW_RATES = {"adam": "log:1e-4..1e-2", "partial_rowwise_adam": "log:1e-4..1e-2", "lamb": "log:1e-4..1e-2"}
"""Learning rates of rows by optimizer; of the others `log:0.01..0.3`."""
DEFAULTS = (
    "tower.optimizer.lr=log:3e-4..1e-2",
    "tower.optimizer.weight_decay=0,1e-6,1e-5,1e-4",
    "tables.default.optimizer.weight_decay=0,1e-6,1e-5,1e-4",
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
"""Searched where `--over` does not say otherwise and the job has the key."""


def space_of(load: Load, over: Sequence[str]) -> dict[str, Values]:
    """The keys to search. Raises ConfigError: `--over` names no key of the job, or a value that it cannot have."""
    job, own = load([]), dict(map(_parsed, over))
    models = own.get("model.name")
    names = list(models.choices) if isinstance(models, CategoricalDistribution) else [job.model.name]
    for key, values in own.items():
        if problem := _problem(load, key, values, names):
            text = next(text for text in over if text.partition("=")[0] == key)
            raise ConfigError(f"--over {text}: {problem}")
    rates = ROW_RATES.get(job.table("default").optimizer.name, "log:0.01..0.3")
    listed = map(_parsed, (f"tables.default.optimizer.lr={rates}", *DEFAULTS))
    known = settings_of(job)
    default = {key: _including(values, known.get(key)) for key, values in listed if key not in own}
    return {key: values for key, values in default.items() if not _problem(load, key, values, names)} | own


def settings_of(job: JobConfig) -> dict[str, Any]:
    """All settings by dotted key, the default table's in full."""
    return flat({**job.model_dump(mode="json"), "tables": {"default": job.table("default").model_dump(mode="json")}})


def as_shown(values: Values) -> str:
    """The values as `--over` takes them."""
    if isinstance(values, CategoricalDistribution):
        return ",".join(map(str, values.choices))
    return f"{'log:' if values.log else ''}{values.low}..{values.high}"


def job_s_own(job: JobConfig, space: Mapping[str, Values]) -> dict[str, Any]:
    """The values of the job as it stands, of the keys that may have them."""
    known, own = settings_of(job), {}
    for key, values in space.items():
        value = known.get(key)
        if isinstance(values, CategoricalDistribution):
            own |= {key: _text(value)} if _text(value) in values.choices else {}
        elif isinstance(value, int | float) and values.low <= value <= values.high:
            own[key] = value
    return own


def _parsed(text: str) -> tuple[str, Values]:
    """Raises ConfigError."""
    key, equals, wanted = text.partition("=")
    try:
        if not (equals and key and wanted):
            raise ValueError(f"is not of a form that is {FORMS}")
        if found := _RANGE.fullmatch(wanted):
            return key, _range(bool(found[1]), found[2], found[3])
        choices = dict.fromkeys(map(_text, read_yaml(f"[{wanted}]")))
        return key, CategoricalDistribution(list(choices))
    except (ValueError, YamlError) as error:
        raise ConfigError(f"--over {text}: {error}") from error


def _range(log: bool, low: str, high: str) -> Values:
    try:
        if _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high):
            return IntDistribution(int(low), int(high), log=log)
        return FloatDistribution(float(low), float(high), log=log)
    except ValueError:
        least = ", LOW above 0" if log else ""
        raise ValueError(f"{low}..{high} is no range; allowed: two numbers LOW..HIGH, LOW below HIGH{least}") from None


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value)


def _including(values: Values, own: Any) -> Values:
    """The values of a default with the job's own."""
    if isinstance(values, CategoricalDistribution):
        return CategoricalDistribution(list(dict.fromkeys([_text(own), *values.choices])))
    if not isinstance(own, int | float):
        return values
    return type(values)(min(values.low, own), max(values.high, own), log=values.log)  # type: ignore[arg-type]


def _problem(load: Load, key: str, values: Values, names: Sequence[Any]) -> str:
    """Why the job cannot have one of the values; "" = it can have all, with each of the models `names`."""
    ends = values.choices if isinstance(values, CategoricalDistribution) else (values.low, values.high)
    for name, value in itertools.product([None] if key == "model.name" else names, ends):
        try:
            load([*([] if name is None else [f"model.name={name}"]), f"{key}={value}"])
        except ConfigError as error:
            return str(error).splitlines()[0].rpartition("--set ")[2].partition(": ")[2]
    return ""
