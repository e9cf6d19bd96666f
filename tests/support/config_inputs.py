"""Wrong and odd values for every setting, made from the models' schema: a new setting is covered from its first day."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from shardkeep.config import JobConfig
from shardkeep.config.schema import Schema, branches, schema_of

ODD: dict[str, Any] = {
    "nothing": None,
    "truth": True,
    "word": "no-such-word",
    "empty": "",
    "nul": "a\0b",
    "unicode": "\u202e\U0001f600\u00e9 \n",
    "long": "x" * 5_000,
    "minus": -1,
    "half": 0.5,
    "nan": float("nan"),
    "infinite": float("-inf"),
    "huge": 2**64,
    "tiny": 1e-320,
    "empty-list": [],
    "lists": [[[None]], {"a": 1}],
    "empty-mapping": {},
    "unknown-key": {"no_such_key": {"name": "adam"}},
    "number-key": {1: 2},
    "many": ["x"] * 60,
}


@dataclass(frozen=True)
class Place:
    """One setting: its keys, and the kind of its group, where that has one."""

    keys: tuple[str | int, ...]
    kind: str | None
    known: bool = True
    """False: no model has this key."""

    def text(self, value: Any) -> str:
        """The YAML of a job that has `value` here."""
        *above, last = self.keys
        raw: Any = {last: value} if self.kind is None else {"name": self.kind, last: value}
        if isinstance(last, int):
            raw = [value]
        for key in reversed(above):
            raw = [raw] if isinstance(key, int) else {key: raw}
        return yaml.safe_dump(raw, allow_unicode=True, sort_keys=False)


def inputs(values_per_place: int) -> Iterator[tuple[str, Place, str]]:
    """(name, place, text) of configs: at every place some odd values, all of them in turn."""
    values = itertools.cycle(ODD)
    for number, place in enumerate(places()):
        for name in itertools.islice(values, values_per_place if place.known else 1):
            yield f"{number}-{'.'.join(map(str, place.keys))}-{name}", place, place.text(ODD[name])


def places() -> list[Place]:
    """Every setting of a job, and an unknown one in each group."""
    schema = schema_of(JobConfig)
    return list(_below(schema, schema["$defs"], ()))


def _below(schema: Schema, definitions: Schema, keys: tuple[str | int, ...]) -> Iterator[Place]:
    for branch in branches(schema, definitions):
        properties = branch.get("properties", {})
        kind = properties.get("name", {}).get("const")
        for key, below in properties.items():
            if kind is None or key != "name":
                yield Place((*keys, key), kind)
                yield from _below(below, definitions, (*keys, key))
        if properties:
            yield Place((*keys, f"{next(iter(properties))}_x"), kind, known=False)
        if isinstance(branch.get("additionalProperties"), Mapping):
            yield from _below(branch["additionalProperties"], definitions, (*keys, "some"))
        if isinstance(branch.get("items"), Mapping):
            yield Place((*keys, 0), None)
            yield from _below(branch["items"], definitions, (*keys, 0))
