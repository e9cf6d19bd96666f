"""The plan of a sweep: from its YAML file to the jobs that it runs. Reads and checks; runs nothing, needs no torch."""

from __future__ import annotations

import difflib
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
from shardkeep.config.overrides import copied, flat, merged
from shardkeep.config.paths import anchored
from shardkeep.config.problems import explain, shown

Nested = dict[str, Any]
DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=,+-]*$"


class RecipeEntry(Settings):
    """A recipe of the sweep: a shipped one by its name alone, or an own one."""

    name: str = Field(pattern=_NAME, max_length=40)
    """What it is called in the results; also part of folders' names."""
    like: str | None = None
    """Shipped recipe that `settings` are added to; left out = none."""
    settings: Nested | None = None
    """Settings of a job, nested or as a.b: value."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class SweepConfig(Settings):
    """One sweep file."""

    base: str | Nested
    """The job that all runs share: the path of its YAML file (relative to this one), `demo`, or the job itself."""
    settings: Nested = Field(default_factory=dict)
    """Settings over the base for every run, nested or as a.b: value."""
    recipes: Annotated[list[Annotated[RecipeEntry, BeforeValidator(_named)]], Field(min_length=1)]
    """Shipped recipes by name, and own ones."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]
    """Seeds of the job; every recipe is run with each."""
    metric: str = Field("auc", pattern=r"^auc(/.+)?$")
    """By what recipes are compared: auc, or auc/LABEL of a job with several labels."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe: what is run with every seed."""

    name: str
    purpose: str
    settings: Nested
    """What it changes in the base."""

    @property
    def text(self) -> str:
        """The settings on one line."""
        return flow(dict(sorted(flat(self.settings).items())))


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One job."""

    variant: Variant
    seed: int
    config: JobConfig
    metric: str = "auc"

    @property
    def name(self) -> str:
        return f"{self.variant.name}-seed{self.seed}"

    def key(self, name: str) -> str:
        """The key of a metric in an evaluation: of the label by which recipes are compared, where there are several."""
        return name + self.metric.removeprefix("auc")


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All jobs of a sweep, seed by seed, so that what is done can be compared early."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    code_folder: Path
    """Where the user's own modules are."""
    path: Path
    """The sweep file, as the user named it."""
    text: str
    """What it holds."""


def load_sweep(path: Path, metric: str | None = None) -> SweepPlan:
    """Reads a sweep file and plans its runs. Raises ConfigError: one line that names the key and what is allowed.

    Args:
        metric: In place of the file's."""
    try:
        text = read_text(path)
        raw = read_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {shown(raw)}; allowed: a mapping with base, recipes and seeds")
    if "grid" in raw:
        raise ConfigError(f"{path}: grid: has moved: `shardkeep tune JOB --grid --over KEY=A,B` runs every combination")
    try:
        config = SweepConfig.model_validate(raw if metric is None else raw | {"metric": metric})
    except ValidationError as error:
        nothing = "seeds: [] runs nothing; allowed: a list of one or more seeds" if raw.get("seeds") == [] else ""
        raise ConfigError(f"{path}: {nothing or explain(error, SweepConfig)}") from error
    try:
        return _plan(config, path, text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _plan(sweep: SweepConfig, path: Path, text: str) -> SweepPlan:
    if twice := [seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1]:
        raise ConfigError(f"seeds: {twice[0]} is there twice; a run is made once")
    base, folder, name = _base(sweep, path)
    if base.get("compression"):
        raise ConfigError(
            "base: sets compression, which recipes replace; leave it out, or make it a recipe with name and settings"
        )
    if table := next((name for name, table in base.get("tables", {}).items() if table.get("compression")), None):
        raise ConfigError(
            f"base: sets tables.{table}.compression, so that fp32 would not be plain; leave it out, or make it a recipe"
        )
    variants = (*map(_shipped, BASELINES), *(v for v in _recipes(sweep.recipes) if v.name not in BASELINES))
    kept = [(variant, _job(base, variant, path.resolve().parent, sweep.metric)) for variant in variants]
    runs = [
        PlannedRun(variant, seed, config.model_copy(update={"seed": seed}), sweep.metric)
        for seed in sweep.seeds
        for variant, config in kept
    ]
    return SweepPlan(name, variants, tuple(sweep.seeds), tuple(runs), folder, path, text)


def _base(sweep: SweepConfig, path: Path) -> tuple[Nested, Path, str]:
    """The base job as it was written, with an absolute data.root; where its own modules are; the sweep's name."""
    if isinstance(sweep.base, str):
        found = path.parent / sweep.base
        if sweep.base == "demo" and not found.exists():
            found = DEMO
        job, folder = load_config(found), (path if found == DEMO else found).resolve().parent
    else:
        folder = path.resolve().parent
        job = parse_config(write_yaml(sweep.base), origin="base", folder=folder)
    above = anchored(nested(sweep.settings, "settings"), path.resolve().parent, JobConfig)
    base = merged(job.model_dump(mode="json", exclude_unset=True), above)
    config = _validated(base, "settings", above)  # what every run shares is wrong once, not in each recipe
    if config.checkpoint.dir is not None:
        raise ConfigError("checkpoint.dir: all runs would share it; leave it out, each run has a folder of its own")
    return base, folder, path.stem


def _recipes(entries: Sequence[RecipeEntry]) -> Iterator[Variant]:
    seen: set[str] = set()
    for at, entry in enumerate(entries):
        by_name = entry.settings is None and entry.like is None
        variant = _shipped(entry.name, f"recipes.{at}") if by_name else _own(entry, f"recipes.{at}")
        if variant.name in seen:
            raise ConfigError(f"recipes.{at}: {variant.name} is there twice; give one of them another name")
        seen.add(variant.name)
        yield variant


def _shipped(name: str, where: str = "recipes") -> Variant:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = LEFT.get(name) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}")
        raise ConfigError(f"{where}: {name!r} is no recipe; {hint}")
    recipe = RECIPES[name]
    return Variant(recipe.name, recipe.purpose, copied(recipe.settings))


def _own(recipe: RecipeEntry, where: str) -> Variant:
    if recipe.name in RECIPES:
        what = "a baseline of every sweep" if recipe.name in BASELINES else "a shipped recipe"
        raise ConfigError(f"{where}: {recipe.name} is {what}; give your own another name")
    settings = nested(recipe.settings or {}, f"{where}.settings")
    if recipe.like is not None:
        settings = merged(_shipped(recipe.like, f"{where}.like").settings, settings)
    if "seed" in settings:
        raise ConfigError(f"{where}: seed is no setting of a recipe; list the seeds under `seeds`")
    return Variant(recipe.name, f"as {recipe.like}, changed" if recipe.like else "of the sweep's own", settings)


def _job(base: Nested, variant: Variant, folder: Path, metric: str) -> JobConfig:
    """The job of a variant of the sweep file in `folder`, whose runs are compared by `metric`."""
    model = variant.settings.get("model")
    if isinstance(model, Mapping) and "name" in model:
        base = of_model(base, model["name"])
    config = _validated(anchored(merged(base, variant.settings), folder, JobConfig), variant.name, variant.settings)
    if config.data.labels or metric != "auc":
        known = [name for name in config.evaluated if name.partition("/")[0] == "auc"]
        if metric not in known:
            allowed = f"--metric {', '.join(known)}" if known else "eval.metrics with auc"
            raise ConfigError(
                f"{variant.name}: does not evaluate {metric}, by which a sweep compares; allowed: {allowed}"
            )
    elif "auc" not in config.eval.asked(config.train.loss):
        raise ConfigError(
            f"{variant.name}: does not evaluate auc, by which a sweep compares; allowed: eval.metrics with it"
        )
    return config


def _validated(raw: Nested, where: str, given: Mapping[str, Any]) -> JobConfig:
    """The config of a job. Raises ConfigError where it is wrong or has no effect of a setting in `given`."""
    try:
        job = JobConfig.stored(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, JobConfig)}") from error
    for path, text in unused(job).items():
        if any(f"{key}.".startswith(f"{path}.") for key in flat(given)):
            raise ConfigError(f"{where}: {path}: {text}")
    return job.with_effect()


def nested(settings: Mapping[str, Any], where: str) -> Nested:
    """`a.b: value` at the top as nested mappings, those that are nested already merged in. Raises ConfigError."""
    found: Nested = {}
    for key, value in settings.items():
        *parents, last = str(key).split(".")
        if not all((*parents, last)):
            raise ConfigError(f"{where}: {key!r} is not of the form a.b")
        one: Nested = {last: value}
        for parent in reversed(parents):
            one = {parent: one}
        found = merged(found, one)
    return found


def flow(settings: Mapping[str, Any]) -> str:
    """Settings on one line, as YAML."""
    return write_yaml(settings, default_flow_style=True, sort_keys=False, width=10**6).strip()
