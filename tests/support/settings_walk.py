"""A walk over the settings of jobs: other values for each, and what a short job with them leaves behind."""

from __future__ import annotations

import copy
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig

Place = tuple[str | int, ...]
FIGURES = (
    "steps", "samples", "ids_per_step", "dropped_rows", "eval", "skipped_steps", "state_digest", "best",
    "test", "staleness", "tables",
)  # fmt: skip
"""Keys of a summary that hold no time."""
NUMBERS = (2, 1, 0.01, 5, 0.3, 64, 0)


def settings_of(model: BaseModel, place: Place = ()) -> Iterator[tuple[Place, type[BaseModel], Any]]:
    """Place, class and value of each setting below `model`, groups that are left out included."""
    for name in type(model).model_fields:
        value, here = getattr(model, name), (*place, name)
        parts = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        models = {key: part for key, part in parts.items() if isinstance(part, BaseModel)}
        if isinstance(value, BaseModel):
            yield from settings_of(value, here)
        elif models:
            for key, part in models.items():
                yield from settings_of(part, (*here, key))
        else:
            yield here, type(model), value


def values_of(kind: Any) -> list[Any]:
    """Values of a type, some of which its field may refuse."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if kind is bool:
        return [False, True]
    if kind in (int, float):
        return [each for each in NUMBERS if kind is float or isinstance(each, int)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [{}]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(kind) for value in values_of(part)]
    if typing.get_origin(kind) is typing.Annotated:
        return values_of(typing.get_args(kind)[0])
    return values_of(kind.__value__) if hasattr(kind, "__value__") else []


def models_of(kind: Any) -> set[type[BaseModel]]:
    """The groups of settings in a type, with those below them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {kind}.union(*(models_of(field.annotation) for field in kind.model_fields.values()))
    parts = (kind.__value__,) if hasattr(kind, "__value__") else typing.get_args(kind)
    return set().union(*map(models_of, parts)) if typing.get_origin(kind) is not typing.Literal else set()


def changed(raw: Mapping[str, Any], place: Place, value: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(dict(raw))
    at = found
    for key in place[:-1]:
        if isinstance(at, dict):
            at.setdefault(key, {})
        if isinstance(at[key], str):  # of settings whose first key may represent them
            at[key] = {
                "column" if place[0] == "data" and key != "split" else "by" if key == "split" else "name": at[key]
            }
        at = at[key]
    at[place[-1]] = value
    return dict(found)


def outcome(raw: Mapping[str, Any], run: Path) -> dict[str, Any] | str:
    """What a job leaves behind, except times and its config; or the line that refuses it."""
    try:
        shardkeep.train(JobConfig.model_validate(raw), run_dir=run, quiet=True)
    except (ValidationError, UserError) as error:
        return str(error)
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    paths = sorted(run.rglob("manifest.json"))
    manifest = json.loads(paths[-1].read_text()) if paths else {"files": [], "facts": {"inputs": None}}
    return {key: summary.get(key) for key in FIGURES} | {
        "bytes": {key: summary["bytes"][key] for key in ("push", "pull", "read", "tower")},
        "records": sorted(
            json.dumps([line.get(key) for key in ("kind", "phase", "step", "warning")]) for line in lines
        ),
        "files": sorted(str(file.relative_to(run)) for file in run.rglob("*")),
        "inputs": manifest["facts"]["inputs"],
        "rows": sum(each["size"] for each in manifest["files"] if "/rows" in each["path"]),
        "tower": {key: summary["tower"][key] for key in ("chosen", "parameters")},
    }
