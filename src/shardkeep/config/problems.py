"""What is wrong with settings, in plain words: a pydantic error as lines of key, value and what is allowed.

What is allowed is read from the models' schema, so that a new setting needs no words of its own here.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from shardkeep.base.errors import did_you_mean
from shardkeep.config.schema import Schema, branches, child, kinds, schema_of

MOST_LINES = 20
"""Problems of one file that are shown."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    keys: tuple[str, ...]
    """Where: the keys from the top; empty for the whole."""
    text: str
    """What: the value, and what is allowed."""

    def __str__(self) -> str:
        return f"{'.'.join(map(_key, self.keys))}: {self.text}" if self.keys else self.text


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """All that is wrong, each once, in the order of the settings."""
    schema = schema_of(model)
    problems: dict[Any, Problem] = {}
    for one in error.errors(include_url=False):
        place = _Place.of(one, schema)
        problem = _problem(one, place)
        own = one["type"] in ("value_error", "assertion_error")
        problems.setdefault(problem if own else (place.keys, one["type"] == "missing"), problem)  # a union has several
    return list(problems.values())


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem as one line, and how many more there are."""
    first, *others = problems_of(error, model)
    return f"{first} (and {len(others)} more)" if others else str(first)


def lines(problems: Sequence[str], origin: str) -> str:
    """Problems one below the other, the first of them where they are many."""
    left = len(problems) - MOST_LINES
    return "\n".join([*problems[:MOST_LINES], *([f"{origin}: and {left} more problems"] if left > 0 else [])])


def shown(value: Any) -> str:
    """A value as a person writes it, at most 80 characters."""
    if value is None:
        return "an empty value"
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer that Python does not print
        text = "a very long number"
    return text if len(text) <= 80 else text[:77] + "..."


class _Short(reprlib.Repr):
    """Cuts what is long, and says what YAML says."""

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - reprlib looks for the type's name
        return "null"

    def repr_bool(self, value: bool, _level: int) -> str:
        return str(value).lower()


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 78
_SHORT.maxlist = _SHORT.maxdict = 8


def _key(part: str) -> str:
    return part if part.isprintable() and 0 < len(part) <= 80 else shown(part)


@dataclass(frozen=True)
class _Place:
    """Where in the settings a problem is, without what pydantic says of unions there."""

    keys: tuple[str, ...]
    here: tuple[Schema, ...]
    """What may be there, one of them."""
    above: tuple[Schema, ...]
    """The same one level higher."""
    kind: str = ""
    """The kind of the union that the place is inside of, as `name: adam`."""

    @classmethod
    def of(cls, error: Mapping[str, Any], schema: Schema) -> _Place:
        definitions = schema.get("$defs", {})
        place = cls((), tuple(branches(schema, definitions)), ())
        loc = error["loc"][:-2] if error["loc"][-1:] == ("[key]",) else error["loc"]
        for at, part in enumerate(loc):
            place = place._below(part, definitions, last=at == len(loc) - 1, unknown=error["type"])
        return place

    def _below(self, part: Any, definitions: Schema, *, last: bool, unknown: str) -> _Place:
        if _BRANCH.match(str(part)):
            return self
        for schema in self.here:
            union = schema.get("discriminator")
            if union and part in union["mapping"] and not self.kind:
                branch = definitions[union["mapping"][part].rsplit("/", 1)[1]]
                kind = f"{union['propertyName']}: {part}"
                return _Place(self.keys, tuple(branches(branch, definitions)), self.above, kind)
        for schema in self.here:
            if (below := child(schema, part)) is not None:
                return _Place((*self.keys, str(part)), tuple(branches(below, definitions)), self.here)
        if last and unknown in ("extra_forbidden", "missing", "invalid_key"):
            return _Place((*self.keys, str(part)), (), self.here, self.kind)
        return self  # the branch of a union that pydantic tried

    def known_keys(self) -> list[str]:
        return sorted({key for schema in self.above for key in schema.get("properties", {})})


def _problem(error: Mapping[str, Any], place: _Place) -> Problem:
    kind, value = error["type"], error["input"]
    if kind == "invalid_key":
        return Problem(place.keys[:-1], f"the key {shown(value)} is not allowed; allowed: {_QUOTED}")
    if error["loc"][-1:] == ("[key]",):
        return Problem(place.keys, f"the key {shown(value)} is not allowed; allowed: {_key_words(place.here)}")
    if kind == "extra_forbidden":
        return Problem(place.keys, _unknown_key(place, value))
    if kind == "missing":
        return Problem(place.keys, f"is missing; allowed: {allowed(place.here)}")
    if kind == "union_tag_not_found" and isinstance(value, Mapping):
        return Problem((*place.keys, "name"), f"is missing; allowed: {_one_of(kinds(place.here))}")
    if kind == "union_tag_invalid":
        known = kinds(place.here)
        return _refused(
            (*place.keys, "name"), error["ctx"]["tag"], f"{_one_of(known)}{did_you_mean(error['ctx']['tag'], known)}"
        )
    if kind in ("value_error", "assertion_error"):
        return _own_words(str(error["ctx"]["error"]), value, place)
    return _refused(place.keys, value, allowed(place.here))


def _refused(keys: tuple[str, ...], value: Any, words: str) -> Problem:
    return Problem(keys, f"{shown(value)} is not allowed; allowed: {words}")


def _own_words(message: str, value: Any, place: _Place) -> Problem:
    """The text that a validator of ours raised; what it says of a key below goes to that key."""
    message = message.splitlines()[0] if message else "is not allowed"
    key, colon, rest = message.partition(": ")
    if not isinstance(value, Mapping | BaseModel) and place.keys:
        link = ";" if message.startswith("allowed: ") else ":"
        return Problem(place.keys, f"{shown(value)} is not allowed{link} {message}")
    if colon and any(key.partition(".")[0] in schema.get("properties", {}) for schema in place.here):
        return Problem((*place.keys, *key.split(".")), rest)
    return Problem(place.keys, message)


def _unknown_key(place: _Place, value: Any) -> str:
    for schema in place.above:
        if way_out := schema.get("left", {}).get(place.keys[-1]):
            return f"unknown key; {way_out.replace('VALUE', shown(value))}"
    known = place.known_keys()
    near = difflib.get_close_matches(place.keys[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key{f' with {place.kind}' if place.kind else ''}; {hint}"


_BRANCH = re.compile(r"(list|dict|function-[a-z]+)\[")
"""Begins the name of a branch of a union that pydantic tried."""
_QUOTED = 'text; put a number or a truth value in quotes, as in "1"'


def _key_words(schemas: Sequence[Schema]) -> str:
    limits = [schema["propertyNames"] for schema in schemas if "propertyNames" in schema]
    return f"text{_lengths(limits[0], 'characters')}, a number in quotes" if limits else _QUOTED


def allowed(schemas: Sequence[Schema]) -> str:
    """What may stand at a place, in words."""
    if names := kinds(schemas):
        return f"{_one_of(names)}, or a mapping with name and its settings"
    found = [words for schema in schemas for words in _words(schema)]
    return _one_of(list(dict.fromkeys(found))) or "anything"


def _words(schema: Schema) -> list[str]:
    if "allowed" in schema:
        return [str(schema["allowed"])]
    if "enum" in schema or "const" in schema:
        return [str(value) for value in schema.get("enum", [schema.get("const")])]
    match schema.get("type"):
        case "integer":
            return [f"a whole number{_range(schema)}"]
        case "number":
            return [f"a number{_range(schema)}"]
        case "boolean":
            return ["true", "false"]
        case "string":
            return [f"text{_lengths(schema, 'characters')}"]
        case "array" if "prefixItems" in schema:
            return [f"a list of {len(schema['prefixItems'])}{_of_each(schema['prefixItems'][0])}"]
        case "array":
            return [f"a list{_lengths(schema, 'values')}{_of_each(schema.get('items', {}))}"]
        case "object" if "properties" in schema:
            first = next(iter(schema["properties"].values())) if schema.get("short") else {}
            return [*_words(first), f"a mapping with keys of {', '.join(schema['properties'])}"]
        case "object":
            return ["a mapping"]
    return []


def _of_each(items: Schema) -> str:
    words = _words(items)
    return f", each {_one_of(words)}" if words else ""


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    limits = {"of at least": low, "above": above, "up to": high, "below": below}
    parts = [f"{word} {_number(limit)}" for word, limit in limits.items() if limit is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _lengths(schema: Schema, unit: str) -> str:
    low = schema.get("minLength", schema.get("minItems"))
    high = schema.get("maxLength", schema.get("maxItems"))
    if low is not None and high is not None:
        return f" of {_number(low)} to {_number(high)} {unit}"
    if high is not None:
        return f" of at most {_number(high)} {unit}"
    return f" of {_number(low)} {unit[:-1] if low == 1 else unit} or more" if low else ""


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and (isinstance(value, int) or value < 1e7) else f"{value:g}"


def _one_of(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
