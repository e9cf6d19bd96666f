"""Record: one line of metrics.jsonl or telemetry.jsonl, and how a class of records reads and writes its keys.

A key that a line lacks, or has with another type, is None; a mapping or a list is empty then. Keys of another version
are in `others`. What is written again has the same keys in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Self, get_args, get_origin, get_type_hints

Json = Mapping[str, Any]
_BOOKKEEPING = ("others", "keys")


def key(text: str, *, null: bool = False, empty: Callable[[], Any] | None = None, metric: str = "") -> Any:
    """A key of a record. `text`: for the reference. `null`: its value may be null. `empty`: makes its value where the
    file has none. `metric`: kind and name of the metric that has the same figure."""
    facts = {"text": text, "null": null, "metric": metric}
    if empty is None:
        return field(default=None, metadata=facts)
    return field(default_factory=empty, metadata=facts)


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of one key. `types`: of its value in JSON."""

    name: str
    read: Callable[[Any], Any]
    types: tuple[type, ...]
    text: str
    null: bool
    metric: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A JSON object with known keys. The base of all records, for a record is what its class adds to it."""

    others: Json = field(default_factory=dict)
    """Keys that are not known here."""
    keys: tuple[str, ...] = ()
    """All keys in the order of the file."""

    @classmethod
    def of(cls, found: Json) -> Self:
        """Reads a JSON object, of any version."""
        known = keys_of(cls)
        values = {name: known[name].read(value) for name, value in found.items() if name in known}
        others = {name: value for name, value in found.items() if name not in known}
        return cls(**values, others=others, keys=tuple(found))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object again."""
        known = keys_of(type(self))
        names = self.keys or [name for name in known if getattr(self, name) not in (None, {}, ())]
        return {name: _plain(getattr(self, name)) if name in known else self.others[name] for name in names}


@dataclass(frozen=True, kw_only=True)
class Record(Part):
    """What every record has."""

    time: str | None = key("when the record was made, by the process's own clock: local, ISO 8601")
    kind: str = key("`progress`, `eval`, `phase`, `event` or `telemetry`", empty=str)
    role: str = key("`coordinator`, `server` or `worker`", empty=str)
    index: int = key("its number in its role, from 0", empty=int)

    @functools.cached_property
    def at(self) -> float | None:
        """`time` in seconds since 1970."""
        try:
            return None if self.time is None else datetime.fromisoformat(self.time).timestamp()
        except (ValueError, OverflowError):
            return None


def keys_of(kind: type[Part]) -> Mapping[str, Key]:
    """The keys of a class of records by name, in order."""
    return _keys_of(kind)  # type: ignore[arg-type]  # mypy takes the hash of its instances for the class's


@functools.cache
def _keys_of(kind: type[Part]) -> Mapping[str, Key]:
    hints = get_type_hints(kind)
    found = {}
    for each in fields(kind):
        if each.name not in _BOOKKEEPING:
            read, types = _form(hints[each.name])
            found[each.name] = Key(each.name, read, types, **each.metadata)
    return found


def number(value: Any) -> float | int | None:
    """`value` where it is a finite number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def numbers(value: Any) -> dict[str, float]:
    """The numbers of a JSON object by name."""
    found = value.items() if isinstance(value, Mapping) else ()
    return {str(name): size for name, each in found if (size := number(each)) is not None}


def added(one: Json, other: Json) -> dict[str, Any]:
    """The sum of two nested counts."""
    total = dict(one)
    for name, value in other.items():
        total[name] = added(total.get(name) or {}, value) if isinstance(value, Mapping) else total.get(name, 0) + value
    return total


def _form(hint: Any) -> tuple[Callable[[Any], Any], tuple[type, ...]]:
    """How a value of a type is read, and what it is in JSON."""
    if get_origin(hint) is tuple:
        part = get_args(hint)[0]
        return lambda value: tuple(part.of(each) for each in _objects(value)), (list,)
    if (origin := get_origin(hint)) is not None and issubclass(origin, Mapping):
        return (numbers if get_args(hint)[1] in (int, float) else _object), (dict,)
    kind, optional = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)), bool(get_args(hint))
    if kind in (int, float):
        return (number if optional else lambda value: int(number(value) or 0)), (int, float)
    if kind in (str, bool):
        empty = None if optional else kind()
        return lambda value: value if isinstance(value, kind) else empty, (kind,)
    return lambda value: kind.of(value) if isinstance(value, Mapping) else None, (dict,)


def _object(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Json]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_dict()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
