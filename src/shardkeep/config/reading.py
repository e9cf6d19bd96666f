"""The reader of a job's YAML: overrides, paths, and a line for each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import local
from shardkeep.base.logs.log import EventLog
from shardkeep.base.settings import known
from shardkeep.base.yaml_text import YamlError, read_text, read_yaml
from shardkeep.config.job import JobConfig
from shardkeep.config.overrides import Override, blamed, copied, is_at, overridden
from shardkeep.config.paths import anchored, below_shell
from shardkeep.config.problems import MOST_LINES, Problem, lines, problems_of, shown
from shardkeep.config.retrieval import loss_fits
from shardkeep.config.rules import unused
from shardkeep.workers.model_config import MODELS, keys_of

_log = EventLog("config")
Judged = Literal["all", "overrides", "nothing"]
"""Which settings are refused where they have no effect: `overrides` for a config that nobody wrote by hand."""


def load_config(
    path: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, judged: Judged = "all"
) -> JobConfig:
    """Reads a YAML file and applies `a.b=value` overrides. A relative path in the file is relative to the file's folder
    (`data.train`, `eval`, `test` and `cache`: to `data.root`); one in an override is relative to the current folder.

    Args:
        path: Or what such a file in the current folder would hold.
        judged: Which settings are refused where they have no effect. An override may always switch off what the file
            sets.

    Raises ConfigError: a line for each problem, with the key, its value and what is allowed.
    """
    if isinstance(path, Mapping):
        return _config_of(copied(path), overrides, origin="config", folder=Path.cwd(), judged=judged)
    folder = Path(path).resolve().parent
    return parse_config(_text_of(path), overrides, origin=str(path), folder=folder, judged=judged)


def stored_config(run: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The config of a run folder, as `load_config`."""
    path = run / "config.yaml"
    raw = known(_settings_of(_text_of(path), str(path)), JobConfig)
    return _config_of(raw, overrides, origin=str(path), folder=path.resolve().parent, judged="overrides")


def _text_of(path: str | Path) -> str:
    try:
        return read_text(Path(local(path)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(
    text: str,
    overrides: Sequence[str] = (),
    *,
    origin: str = "config",
    folder: Path | None = None,
    judged: Judged = "all",
) -> JobConfig:
    """`load_config` for a text that is in `folder`; None = relative paths stay as they are."""
    return _config_of(_settings_of(text, origin), overrides, origin=origin, folder=folder, judged=judged)


def _config_of(
    raw: dict[str, Any], overrides: Sequence[str], *, origin: str, folder: Path | None, judged: Judged
) -> JobConfig:
    if folder is not None:
        raw = anchored(raw, folder, JobConfig)
    settings = [Override.parse(override) for override in overrides]
    if folder is not None:
        settings = [below_shell(one, JobConfig) for one in settings]
    base = raw
    for one in settings:
        base = of_model(base, one.value) if one.keys == ("model", "name") else base
    if not raw and not settings:
        raise ConfigError(f"{origin}: is empty; a job needs data, as in data: {{train: [clicks.csv], label: clicked}}")

    job, found = _judged(overridden(base, settings, JobConfig), folder)
    if job is not None and (judged == "nothing" or not found):
        return job
    alone, of_file = _judged(raw, folder)
    if job is not None:  # an override may switch off what the file has
        kept = () if judged == "overrides" else found if alone is None else of_file
        found = [each for each in found if each in kept or any(is_at(one, each) for one in settings)]
        if not found:
            return job
    told = [
        f"{origin if i >= MOST_LINES or problem in of_file else blamed(problem, settings)}: {problem}"
        for i, problem in enumerate(found)
    ]
    raise ConfigError(lines(told, origin))


def of_model(raw: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """A job as the base of one with the model `name`: without keys that this model lacks, which a log line names."""
    found, dropped = fitted_to(raw, name)
    if dropped:
        _log.warning(text := f"model.name: {name} goes without these keys: {', '.join(dropped)}", once=text)
    return found


def fitted_to(raw: Mapping[str, Any], name: Any) -> tuple[dict[str, Any], list[str]]:
    """A job with the model `name`, without keys that this model lacks; and these keys."""
    found, model = copied(raw), raw.get("model")
    if not (isinstance(name, str) and (name in MODELS or ":" in name)):
        return found, []
    before = model.get("name", "dlrm") if isinstance(model, Mapping) else model or "dlrm"
    types, now = keys_of(before), keys_of(name)
    lacks: list[tuple[str, ...]] = [("model", key) for key in types if before != name and types[key] != now.get(key)]
    if not loss_fits(found, name):
        lacks.append(("train", "loss"))
    if name == "lr":
        lacks += [("tables", table, "dim") for table in raw.get("tables") or ()]
    dropped = [".".join(keys) for keys in lacks if _without(found, keys)]
    if isinstance(found.get("model"), dict):
        found["model"]["name"] = name
    return found, dropped


def _without(node: Any, keys: Sequence[str]) -> bool:
    """Deletes what is there at `keys`; whether it was there."""
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    return isinstance(node, dict) and node.pop(keys[-1], None) is not None


def _settings_of(text: str, origin: str) -> dict[str, Any]:
    try:
        raw = read_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{origin}: {error}") from error
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{origin}: holds {shown(raw)}; allowed: a mapping of keys to values")
    return raw or {}


def _judged(raw: dict[str, Any], folder: Path | None) -> tuple[JobConfig | None, list[Problem]]:
    """The config of a text in `folder`, overrides included, None where it is wrong; and what is wrong, or unused."""
    if folder is not None:
        data = {} if raw.get("data") is None else raw["data"]
        raw = {**raw, "data": {"root": str(folder.resolve()), **data} if isinstance(data, dict) else data}
    try:
        job = JobConfig.stored(raw)
    except ValidationError as error:
        return None, problems_of(error, JobConfig)
    return job, [Problem(tuple(path.split(".")), text) for path, text in unused(job).items()]
