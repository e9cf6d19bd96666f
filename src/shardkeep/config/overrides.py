"""`--set a.b=value`: read, laid over the settings of a file, and held to account for what it makes wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import YamlError, read_yaml, write_yaml
from shardkeep.config.problems import Problem, shown
from shardkeep.config.schema import Schema, branches, child, schema_of

_SHORT_KEYS = ("name", "mode", "column")
"""Keys that a bare text may represent."""


@dataclass(frozen=True)
class Override:
    """One `a.b=value`."""

    text: str
    keys: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return _flag(self.text)

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises ConfigError."""
        path, equals, value = text.partition("=")
        keys = tuple(path.split("."))
        if not equals or not all(keys):
            raise ConfigError(f"{_flag(text)}: is not of the form a.b=value")
        try:
            return cls(text, keys, value if value == "," else read_yaml(value))  # YAML refuses a comma alone
        except YamlError as error:
            raise ConfigError(f"{_flag(text)}: {error}") from error


def overridden(raw: Mapping[str, Any], overrides: Sequence[Override], model: type[BaseModel]) -> dict[str, Any]:
    """A copy of `raw` with the overrides laid over it; a bare name in the way becomes a mapping. Raises ConfigError."""
    found = copied(raw)
    schema = schema_of(model) if any(len(one.keys) > 1 for one in overrides) else {}
    for one in overrides:
        node: dict[str, Any] = found
        places = list(branches(schema, schema.get("$defs", {})))
        for key in one.keys[:-1]:
            places = [b for s in places if (c := child(s, key)) is not None for b in branches(c, schema["$defs"])]
            below = node.get(key)
            if isinstance(below, str):
                below = _unfolded(below, places)
            if below is not None and not isinstance(below, dict):
                raise ConfigError(f"{one}: {key} holds {shown(below)}, which has no keys")
            node[key] = node = {} if below is None else below
        node[one.keys[-1]] = one.value
    return found


def blamed(problem: Problem, overrides: Sequence[Override]) -> str:
    """The overrides that a problem comes from, which the file alone does not have: those at its key or named in it."""
    return " ".join(str(one) for one in [o for o in overrides if _concerns(o, problem)] or overrides)


def is_at(override: Override, problem: Problem) -> bool:
    """Whether an override sets the key of a problem, or one above or below it."""
    shared = zip(override.keys, problem.keys, strict=False)
    return bool(problem.keys) and all(one == other for one, other in shared)


def _concerns(override: Override, problem: Problem) -> bool:
    return is_at(override, problem) or re.search(rf"\b{re.escape('.'.join(override.keys))}\b", problem.text) is not None


def _flag(text: str) -> str:
    return f"--set {text if len(text) <= 80 else text[:77] + '...'}"


def _unfolded(text: str, places: Sequence[Schema]) -> Any:
    """`adam` as `{name: adam}` where a mapping of that kind may stand."""
    short = [key for key in _SHORT_KEYS for schema in places if key in schema.get("properties", {})]
    return {short[0]: text} if short else text


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping. One whose `name` changes is replaced as a whole: the settings of
    adam mean nothing to sgd. Neither is changed."""
    found = copied(below)
    for key, value in copied(above).items():
        under = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping) and value.get("name") in (None, under.get("name")):
            value = merged(under, value)
        found[key] = value
    return found


def copied(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose mappings are its own."""
    return {key: copied(below) if isinstance(below, Mapping) else below for key, below in value.items()}


def nested(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`a.b: value` at the top as nested mappings, those that are nested already merged in. Raises ConfigError."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = str(key).split(".")
        if not all((*parents, last)):
            raise ConfigError(f"{where}: {key!r} is not of the form a.b")
        one: dict[str, Any] = {last: value}
        for parent in reversed(parents):
            one = {parent: one}
        found = merged(found, one)
    return found


def flow(settings: Mapping[str, Any]) -> str:
    """Settings on one line, as YAML."""
    return write_yaml(settings, default_flow_style=True, sort_keys=False, width=10**6).strip()


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found
