"""Records as messages of control.proto, and back: by the fields of the messages. Pure functions.

A message has the fields of its record, NAME_json the record's NAME as JSON. A field that is left out has its default.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel

from shardkeep.ps.control.record_forms import built, record_fields, record_from_json, record_to_json

M = TypeVar("M", bound=Message)
R = TypeVar("R")
JSON = "_json"


def to_message(record: Any, kind: type[M]) -> M:
    """The message of this kind that says what the record says."""
    fields = kind.DESCRIPTOR.fields
    return kind(**{field.name: _sent(getattr(record, field.name.removesuffix(JSON)), field) for field in fields})


def _sent(value: Any, field: Any) -> Any:
    if field.name.endswith(JSON):
        each: Any = record_to_json
    elif field.message_type is None or field.message_type.GetOptions().map_entry:
        return value
    else:
        each = functools.partial(to_message, kind=GetMessageClass(field.message_type))
    if value is None:
        return None
    return [each(one) for one in value] if field.is_repeated else each(value)


def from_message(message: Message, kind: type[R]) -> R:
    """The record of this kind that says what the message says. Equal models are one object: many members send the same
    tables. Raises ProtocolError where it is none of ours."""
    if issubclass(kind, BaseModel):
        sent: Any = type(message)
        model: R = _model(kind, sent, message.SerializeToString(deterministic=True))
        return model
    return _record(message, kind)


@functools.lru_cache(maxsize=4096)
def _model(kind: Any, sent: Any, content: bytes) -> Any:
    return _record(sent.FromString(content), kind)


def _record(message: Message, kind: type[R]) -> R:
    inner, values = record_fields(kind), {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            name = field.name.removesuffix(JSON)
            values[name] = _received(getattr(message, field.name), field, inner[name])
    return built(kind, values)


def _received(value: Any, field: Any, kind: type | None) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.name.endswith(JSON):
        each: Any = record_from_json
    elif kind is not None:
        each = functools.partial(from_message, kind=kind)
    else:
        return tuple(value) if field.is_repeated else value
    return tuple(map(each, value)) if field.is_repeated else each(value)
