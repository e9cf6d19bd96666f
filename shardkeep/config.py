"""JobConfig: composes the rooms' settings, loads YAML, checks what spans rooms. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from shardkeep.affinity import AffinityConfig, check_counts
from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.config import ConsistencyConfig, LivenessConfig, TableConfig, TableSpec, TransportConfig
from shardkeep.workers.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OnOff,
    ProfileConfig,
    TowerConfig,
    TrainConfig,
)

_FOLDERS = (("data", "root"), ("checkpoint", "dir"))
"""Settings that name a folder, by group and key."""


class JobConfig(Settings):
    """A whole job: one YAML file."""

    name: str = Field("job", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the job; part of the run folder's name."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial values, shuffling and the tower."""
    servers: int = Field(2, ge=0, le=1024)
    """Server processes; 0 = the tables live in the one worker's process."""
    workers: int = Field(2, ge=1, le=1024, validate_default=True)
    """Worker processes."""
    threads: int = Field(1, ge=1)
    """CPU threads of each worker's tower."""
    affinity: AffinityConfig = AffinityConfig()
    """Cores that the processes of a job on this machine are pinned to: `none`, `auto`, or lists by role."""
    data: DataConfig = DataConfig()
    """Samples."""
    model: ModelConfig = ModelConfig()
    """The dense model."""
    tables: dict[str, TableConfig] = Field(default_factory=dict)
    """Embedding tables by name; `default` holds what the others leave out."""
    tower: TowerConfig = TowerConfig()
    """How the dense model trains."""
    train: TrainConfig = TrainConfig()
    """The training loop."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    consistency: ConsistencyConfig = ConsistencyConfig()
    """What a pull is promised to have seen."""
    compression: CompressionConfig = CompressionConfig()
    """What is compressed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    journal: Annotated[Literal["off", "os", "fsync"], OnOff] = "os"
    """What a server's push survives once it is acknowledged: os = the server's process, fsync = its machine, off =
    neither: a killed server goes back to the last checkpoint."""
    transport: TransportConfig = TransportConfig()
    """How bytes move."""
    liveness: LivenessConfig = LivenessConfig()
    """Deadlines and leases."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of some steps."""

    @field_validator("workers")
    @classmethod
    def _one_process_has_one_worker(cls, workers: int, info: Any) -> int:
        if info.data.get("servers") == 0 and workers != 1:
            raise ValueError("with servers: 0 everything runs in one process; allowed: 1")
        return workers

    @field_validator("affinity")
    @classmethod
    def _cores_are_for_somebody(cls, affinity: AffinityConfig, info: Any) -> AffinityConfig:
        if {"servers", "workers"} <= info.data.keys():
            check_counts(affinity, servers=info.data["servers"], workers=info.data["workers"])
        return affinity

    @model_validator(mode="after")
    def _a_cache_is_not_exact(self) -> JobConfig:
        if self.compression.pull.cache_rows and self.consistency.mode == "sync":
            raise ValueError(
                f"compression.pull.cache_rows: {self.compression.pull.cache_rows} with consistency.mode: sync, where a "
                "pull sees all earlier pushes; allowed: 0, or mode: bounded or async"
            )
        return self

    @model_validator(mode="after")
    def _dgc_has_no_other_optimizer(self) -> JobConfig:
        names = {self.table(name).optimizer.name for name in (*self.tables, "default")} - {"sgd"}
        if self.compression.push.dgc is not None and names:
            raise ValueError(
                f"compression.push.dgc: has momentum of its own, and tables have the optimizer {sorted(names)[0]}; "
                "allowed: sgd"
            )
        return self

    @property
    def own_modules(self) -> bool:
        """Whether it names code of the user's own, `module:name`."""
        return ":" in self.model.name or ":" in self.data.source

    def table(self, name: str) -> TableSpec:
        """The full definition of table `name`: its own settings, then `tables.default`, then the built-in ones."""
        merged: dict[str, Any] = {"name": name}
        for source in (self.tables.get("default"), self.tables.get(name)):
            if source is not None:
                merged |= {k: v for k in ("dim", "optimizer", "init") if (v := getattr(source, k)) is not None}
        return TableSpec(**merged)

    def check_tables(self, used: Sequence[str]) -> None:
        """Raises ConfigError for a table that is not among those that features use."""
        if unused := [name for name in self.tables if name != "default" and name not in used]:
            raise ConfigError(f"tables.{unused[0]}: no feature uses this table; the tables are {', '.join(used)}")

    def to_yaml(self) -> str:
        """The resolved config as YAML; loading it gives an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a YAML file and applies `a.b=value` overrides. A relative path of a folder (`data.root`, `checkpoint.dir`)
    is below the file's folder where it stands in the file, and below the current folder where an override sets it.

    Raises ConfigError: one line that names the key, its value and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file in UTF-8 (byte {error.start})") from error
    return parse_config(text, overrides, origin=str(path), folder=path.resolve().parent)


def parse_config(
    text: str, overrides: Sequence[str] = (), *, origin: str = "config", folder: Path | None = None
) -> JobConfig:
    """`load_config` for a text that stands in `folder`; None = relative paths stay as they are."""
    raw = _yaml(text, origin)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: holds {_shown(raw)}; allowed: a mapping of keys to values")
    if folder is not None:
        _anchor(raw, folder)
    for override in overrides:
        _override(raw, override)
    if folder is not None:
        _anchor(raw, Path.cwd())
        data = raw["data"] = {} if raw.get("data") is None else raw["data"]
        if isinstance(data, dict):
            data.setdefault("root", str(folder.resolve()))
    try:
        return JobConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{_blamed(error, overrides) or origin}: {explain(error, JobConfig)}") from error


def _anchor(raw: dict[str, Any], folder: Path) -> None:
    """Makes the relative paths of folders absolute, as they are below `folder`. Leaves what is no text to the model."""
    for group, key in _FOLDERS:
        if isinstance(settings := raw.get(group), dict) and isinstance(path := settings.get(key), str):
            settings[key] = str((folder / Path(path).expanduser()).resolve())


def _blamed(error: ValidationError, overrides: Sequence[str]) -> str | None:
    """The override that the first problem comes from, if it is one."""
    path = [str(part) for part in error.errors()[0]["loc"]]
    for override in overrides:
        keys = override.partition("=")[0].split(".")
        if keys == path[: len(keys)]:  # of a problem above what it sets, anything below may be the cause
            return f"--set {override}"
    return None


def _yaml(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{origin}: is not YAML{where} ({getattr(error, 'problem', None) or 'unreadable'})"
        ) from error


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: is not of the form a.b=value")
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} holds {_shown(child)}, which has no keys")
        node = child
    node[last] = _yaml(value, f"--set {override}")


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a ValidationError as one line: key, value, what is allowed, the nearest known key."""
    first = error.errors()[0]
    path = ".".join(str(p) for p in first["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    more = len(error.errors()) - 1
    rest = f" (and {more} more)" if more else ""
    if first["type"] in ("missing", "union_tag_not_found"):
        return f"{path}: {message}{rest}"
    return f"{path}: {_shown(first['input'])} is not allowed: {message}{rest}"


def _known_keys(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    keys: Any = model.model_json_schema()
    definitions = keys.get("$defs", {})
    for part in path:
        options = _branches(keys, definitions)
        for schema in options:
            tags = schema.get("properties", {}).get("name", {}).get("const")
            if tags == part:  # the tag of a discriminated union stands in the path
                keys = schema
                break
            if isinstance(part, int) and "items" in schema:
                keys = schema["items"]
                break
            if part in schema.get("properties", {}):
                keys = schema["properties"][part]
                break
            if isinstance(schema.get("additionalProperties"), dict):
                keys = schema["additionalProperties"]
                break
    return sorted({k for s in _branches(keys, definitions) for k in s.get("properties", {})})


def _branches(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "$ref" in schema:
        return _branches(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    found: list[Mapping[str, Any]] = [schema]
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(key, ()):
            found += _branches(branch, definitions)
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
