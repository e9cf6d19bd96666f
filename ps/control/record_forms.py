"""Records as JSON types, and back: by the fields of their classes. Pure functions.

A field whose name begins with an underscore is not written. Tables come from many members and are the same: a text has
them once, each record their number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.control.records import Record

R = TypeVar("R")
PLAIN = {str, int, float, bool, type(None)}
Tables = list[Any]
"""Tuples of models."""


def _record_fields(kind: Any) -> dict[str, type | None]:
    """The names of a record's fields, each with the class of the records in it, alone or in a tuple; None = others."""
    if issubclass(kind, BaseModel):
        return dict.fromkeys(kind.model_fields)
    hints, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
    return {name: _record_in(hints[name]) for name in names if not name.startswith("_")}


record_fields: Callable[[Any], dict[str, type | None]] = functools.cache(_record_fields)


def _record_in(hint: Any) -> type | None:
    """The record class in `X`, `X | None` or `tuple[X, ...]`."""
    if get_origin(hint) in (tuple, Union, types.UnionType):
        return next(filter(None, map(_record_in, get_args(hint))), None)
    known = isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel))
    return hint if known else None


def built(kind: type[R], values: Mapping[str, Any]) -> R:
    """The record with these values. Raises ProtocolError where one is missing, or a model refuses one."""
    try:
        return kind.model_validate(values) if issubclass(kind, BaseModel) else kind(**values)
    except TypeError as error:
        raise ProtocolError(f"{kind.__name__} is not whole: {error}") from error
    except ValidationError as error:
        name = f"{kind.__name__} {values.get('name')!r}"
        raise ProtocolError(f"{name} is not understood: {error.errors()[0]['msg']}") from error


def to_json_types(value: Any, tables: Tables) -> Any:
    """A record, or what is in one. Adds to `tables` those that it has and they lack."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], BaseModel):
            if value not in tables:
                tables.append(value)
            return tables.index(value)
        return [to_json_types(each, tables) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        name: each if type(each := getattr(value, name)) in PLAIN else to_json_types(each, tables)
        for name in record_fields(type(value))
    }


def from_json_types(kind: type[R], values: Mapping[str, Any], tables: Tables) -> R:
    """The inverse. Raises LookupError, TypeError, AttributeError or ProtocolError for what is none."""
    inner = record_fields(kind)
    return built(kind, {name: _value(inner[name], value, tables) for name, value in values.items()})


def _value(kind: type | None, value: Any, tables: Tables) -> Any:
    if isinstance(value, list):
        return tuple(_value(kind, each, tables) for each in value)
    if kind is None or value is None:
        return value
    if issubclass(kind, BaseModel):
        return tables[value]
    return from_json_types(kind, value, tables)


def record_to_json(record: Record) -> str:
    """Numpy scalars become numbers. Raises TypeError where a value is not JSON."""
    return json.dumps(record, default=_plain, separators=(",", ":"))


def record_from_json(text: str) -> Record:
    """Raises ProtocolError unless `text` is a JSON object."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets
        raise ProtocolError(f"a record is not JSON: {text[:60]!r}") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"a record is not a JSON object: {text[:60]!r}")
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    convert = getattr(value, "tolist", None)  # numpy scalars and arrays, tensors
    if callable(convert):
        return convert()
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.60}")
