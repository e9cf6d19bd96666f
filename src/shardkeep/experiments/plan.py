"""The plan of a sweep: a job, its variants and seeds, and the trials that follow. Runs nothing, needs no torch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings
from shardkeep.base.yaml_text import YamlError, read_text, read_yaml, write_yaml
from shardkeep.compression.recipes import BASELINES, LEFT, RECIPES
from shardkeep.config import JobConfig, load_config, of_model, parse_config, unused
from shardkeep.config.over import combinations, read_over
from shardkeep.config.overrides import copied, flat, merged, nested
from shardkeep.config.paths import anchored
from shardkeep.config.problems import explain, shown

FP32 = BASELINES[0]
DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=,+-]*$"


class RecipeEntry(Settings):
    """A recipe of the sweep: a shipped one by its name alone, or an own one."""

    name: str = Field(pattern=_NAME, max_length=40)
    """What it is called in the results; also part of folders' names."""
    like: str | None = None
    """Shipped recipe that `settings` are added to; left out = none."""
    settings: dict[str, Any] | None = None
    """Settings of a job, nested or as a.b: value."""


_Entry = Annotated[RecipeEntry, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]


class SweepConfig(Settings):
    """One sweep file."""

    base: str | dict[str, Any]
    """The job that all trials share: the path of its YAML file (relative to this one), `demo`, or the job itself."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings over the base for every trial, nested or as a.b: value."""
    recipes: list[_Entry] = Field(default_factory=list)
    """Shipped recipes by name, and own ones."""
    over: list[str] = Field(default_factory=list)
    """KEY=A,B,C: every recipe is run with each value, and with every combination of several keys."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]]
    """Seeds of the job; every variant is run with each."""
    metric: str = Field("auc", pattern=r"^auc(/.+)?$")
    """By what variants are compared: auc, or auc/LABEL of a job with several labels."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What is run with every seed. `settings`: what it changes in the job; `point`: the values of `over` in it."""

    name: str
    settings: Mapping[str, Any]
    point: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trial:
    """One job of an experiment. `name`: of its run folder; `settings`: the values of the keys of `--over`."""

    name: str
    config: JobConfig
    settings: Mapping[str, Any]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All jobs of a sweep, seed by seed, so that what is done can be compared early. `path`: the file as the
    user named it; `job`: what all trials share; `code_folder`: where the user's own modules are."""

    path: Path
    job: JobConfig
    variants: tuple[Variant, ...]
    trials: tuple[Trial, ...]
    metric: str
    code_folder: Path

    def key(self, name: str) -> str:
        """The key of a metric in an evaluation: of the label by which variants are compared, if there are several."""
        return name + self.metric.removeprefix("auc")


def load_sweep(path: Path, overrides: Sequence[str] = (), **given: Any) -> SweepPlan:
    """Reads a sweep file, or a job's, and plans the trials. `overrides`: `a.b=value` over the job; `given`: keys in
    place of the file's, None = left out, and lists may be texts such as `1,2`. Raises ConfigError: one line that names
    the key and what is allowed."""
    try:
        given = {key: read_yaml(f"[{value}]") if key in ("recipes", "seeds") and isinstance(value, str) else value
                 for key, value in given.items() if value is not None}  # fmt: skip
        raw = read_yaml(read_text(path))
        if not isinstance(raw, dict):
            raise ConfigError(f"holds {shown(raw)}; allowed: a sweep with base, recipes and seeds, or a job")
        if not raw.keys() & SweepConfig.model_fields.keys():  # a job
            raw = {"base": path.name, "seeds": [load_config(path, overrides).seed]}
        return _plan(SweepConfig.model_validate(raw | given), path, overrides)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, SweepConfig)}") from error
    except (ConfigError, YamlError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _plan(sweep: SweepConfig, path: Path, overrides: Sequence[str]) -> SweepPlan:
    if not sweep.seeds:
        raise ConfigError("seeds: [] runs nothing; allowed: a list of one or more seeds")
    if not (sweep.recipes or sweep.over):
        raise ConfigError(f"nothing is compared with {FP32}; allowed: recipes, or over with KEY=A,B,C")
    base, folder = _base(sweep, path, overrides)
    tables = {f"tables.{name}.": table for name, table in base.get("tables", {}).items()}
    for key, part in {"": base, **tables}.items():
        if part.get("compression"):
            why = "so that fp32 would not be plain; leave it out, or make it a recipe"
            raise ConfigError(f"base: sets {key}compression, {why}")
    variants = tuple(_variants(sweep))
    configs = [_job(base, variant, path.resolve().parent, sweep.metric) for variant in variants]
    trials = tuple(
        Trial(f"{each.name}-seed{seed}", config.model_copy(update={"seed": seed}), each.point, each.name)
        for seed in sweep.seeds
        for each, config in zip(variants, configs, strict=True)
    )
    if twice := [name for name, count in Counter(trial.name for trial in trials).items() if count > 1]:
        allowed = "each recipe and each seed once, and values of over that differ in letters and digits"
        raise ConfigError(f"{twice[0]} is there twice; allowed: {allowed}")
    return SweepPlan(path, JobConfig.stored(base).with_effect(), variants, trials, sweep.metric, folder)


def _base(sweep: SweepConfig, path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """The base job as it was written, with an absolute data.root; and where its own modules are."""
    folder = path.resolve().parent
    if isinstance(sweep.base, str):
        found = path.parent / sweep.base
        found = DEMO if sweep.base == "demo" and not found.exists() else found
        job, folder = load_config(found), (path if found == DEMO else found).resolve().parent
    else:
        job = parse_config(write_yaml(sweep.base), origin="base", folder=folder)
    above = anchored(nested(sweep.settings, "settings"), path.resolve().parent, JobConfig)
    base = merged(job.model_dump(mode="json", exclude_unset=True), above)
    config = _validated(base, "settings", above)  # what every run shares is wrong once, not in each recipe
    if config.checkpoint.dir is not None:
        raise ConfigError("checkpoint.dir: all runs would share it; leave it out, each run has a folder of its own")
    if overrides:
        base = parse_config(write_yaml(base), overrides, folder=folder).model_dump(mode="json", exclude_unset=True)
    return base, folder


def _variants(sweep: SweepConfig) -> Iterator[Variant]:
    """The baselines as they are, and every recipe, or else the job, with each combination of `over`."""
    space = read_over(sweep.over, lists="a sweep")
    recipes = [_recipe(entry, f"recipes.{at}") for at, entry in enumerate(sweep.recipes)]
    yield from (_shipped(name) for name in BASELINES[: 2 if recipes else 1])
    own = [recipe for recipe in recipes if recipe.name not in BASELINES]
    for recipe in own or [Variant("", {}, {})] * bool(space):
        for point in combinations(space):
            values = [f"{_short(key, space)}={re.sub('[^A-Za-z0-9._+-]+', '-', text.strip('[]{} '))}"
                      for key, text in point.items()]  # fmt: skip
            above = nested({key: read_yaml(text) for key, text in point.items()}, "over")
            yield Variant("+".join(filter(None, [recipe.name, *values])), merged(recipe.settings, above), point)


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """The end of a key that no other one has."""
    ends = [key.split(".", number)[-1] for number in range(key.count("."), -1, -1)]
    return next(end for end in ends if sum(f".{each}".endswith(f".{end}") for each in keys) == 1)


def _recipe(entry: RecipeEntry, where: str) -> Variant:
    if entry.settings is None and entry.like is None:
        return _shipped(entry.name, where)
    if entry.name in RECIPES:
        raise ConfigError(f"{where}: {entry.name} is a shipped recipe; give your own another name")
    settings = nested(entry.settings or {}, f"{where}.settings")
    if "seed" in settings:
        raise ConfigError(f"{where}: seed is no setting of a recipe; list the seeds under `seeds`")
    below = {} if entry.like is None else _shipped(entry.like, f"{where}.like").settings
    return Variant(entry.name, merged(below, settings), {})


def _shipped(name: str, where: str = "recipes") -> Variant:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = LEFT.get(name) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}")
        raise ConfigError(f"{where}: {name!r} is no recipe; {hint}")
    return Variant(name, copied(RECIPES[name].settings), {})


def _job(base: Mapping[str, Any], variant: Variant, folder: Path, metric: str) -> JobConfig:
    """The job of a variant of the sweep file in `folder`, whose runs are compared by `metric`."""
    model = variant.settings.get("model")
    if isinstance(model, Mapping) and "name" in model:
        base = of_model(base, model["name"])
    config = _validated(anchored(merged(base, variant.settings), folder, JobConfig), variant.name, variant.settings)
    known = [name for name in config.evaluated if name.partition("/")[0] == "auc"]
    if metric not in known:
        allowed = f"--metric {', '.join(known)}" if known and config.data.labels else "eval.metrics with auc"
        raise ConfigError(f"{variant.name}: does not evaluate {metric}, by which a sweep compares; allowed: {allowed}")
    return config


def _validated(raw: dict[str, Any], where: str, given: Mapping[str, Any]) -> JobConfig:
    """The config of a job. Raises ConfigError where it is wrong or has no effect of a setting in `given`."""
    try:
        job = JobConfig.stored(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, JobConfig)}") from error
    for path, text in unused(job).items():
        if any(f"{key}.".startswith(f"{path}.") for key in flat(given)):
            raise ConfigError(f"{where}: {path}: {text}")
    return job.with_effect()
