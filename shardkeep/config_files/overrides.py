"""`--set a.b=value`: read, laid over the settings of a file, and held to account for what it makes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import YamlError, read_yaml
from shardkeep.config_files.problems import Problem, shown
from shardkeep.config_files.schema import Schema, branches, child, schema_of

_SHORT_KEYS = ("name", "mode", "column")
"""Keys that a bare text may represent."""
_MOST_TRIED = 30


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
            return cls(text, keys, read_yaml(value))
        except YamlError as error:
            raise ConfigError(f"{_flag(text)}: {error}") from error


def overridden(raw: Mapping[str, Any], overrides: Sequence[Override], model: type[BaseModel]) -> dict[str, Any]:
    """A copy of `raw` with the overrides laid over it; a bare name in the way becomes a mapping. Raises ConfigError."""
    found = _copied(raw)
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


def blamed(
    problem: Problem, overrides: Sequence[Override], problems: Callable[[Sequence[Override]], Sequence[Problem]]
) -> str:
    """The overrides that a problem comes from, which the file alone does not have: it goes when one of them goes.

    `problems` says what is wrong with some of the overrides."""
    near = [one for one in overrides if _meet(one.keys, problem.keys)]
    tried = overrides[:_MOST_TRIED]
    guilty = [one for one in tried if problem not in problems([other for other in overrides if other is not one])]
    return " ".join(str(one) for one in guilty or near or overrides)


def _flag(text: str) -> str:
    return f"--set {text if len(text) <= 80 else text[:77] + '...'}"


def _meet(a: Sequence[str], b: Sequence[str]) -> bool:
    return all(x == y for x, y in zip(a, b, strict=False))


def _unfolded(text: str, places: Sequence[Schema]) -> Any:
    """`adam` as `{name: adam}` where a mapping of that kind may stand."""
    short = [key for key in _SHORT_KEYS for schema in places if key in schema.get("properties", {})]
    return {short[0]: text} if short else text


def _copied(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(below) if isinstance(below, Mapping) else below for key, below in value.items()}
