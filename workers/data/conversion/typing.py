"""Typing: what the types of columns in all training files decide, before a value is read. rules.py has the forms."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.chunk import plain_type
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.rules import is_list, is_text, is_time


def facts_of(schemas: Mapping[str, pa.Schema], layout: ColumnLayout) -> Fitted:
    """What files with these schemas, by path, decide: kinds, lists, and which columns hold times. A column of nulls
    decides nothing.

    Texts beside numbers are texts, texts beside times are times. Floats give way to each other kind: a column of NaN
    often has that type.

    Raises DataError for numbers beside times in a column of ids, or in columns of one table; ConfigError for a
    separator of columns that are lists in all files."""
    types = {name: _types(schemas, name) for name in layout.raw_columns()}
    kinds = {name: kind for name, shared in layout.sharing.items() if (kind := _kind(types, shared)) is not None}
    lists = {c.column for c in layout.sparse if c.separator or c.weights or any(map(is_list, types[c.column]))}
    cut = [("sparse", c.separator, [c.column]) for c in layout.sparse]
    cut += [(f"sequences.{name}", g.separator, [*g.columns]) for name, g in layout.sequences.items()]
    for key, separator, columns in cut:
        if separator is not None and all(types[name] and all(map(is_list, types[name])) for name in columns):
            text = f"{', '.join(columns)}: separator: {separator!r} has no effect, the column holds lists"
            raise ConfigError(f"data.{key}: {text}; allowed: no separator")
    entries = {name for group in layout.sequences.values() for name in group.columns}
    times = {n for n, own in types.items() if any(is_time(_entry(kind) if n in entries else kind) for kind in own)}
    return Fitted(frozenset(lists), kinds, times=dict.fromkeys(sorted(times), True))


def _types(schemas: Mapping[str, pa.Schema], name: str) -> dict[pa.DataType, str]:
    """The types of a column, except null, and the first file with each."""
    held = {
        path: plain_type(schema.field(name).type)
        for path, schema in schemas.items()
        if schema.get_field_index(name) >= 0
    }
    return {kind: path for path, kind in reversed(held.items()) if not pa.types.is_null(kind)}


def _kind(types: Mapping[str, Mapping[pa.DataType, str]], columns: list[str]) -> Kind | None:
    """What the columns of one table hold."""
    held: dict[Kind, str] = {}
    for name in columns:
        for kind, path in types[name].items():
            entry = _entry(kind)
            word: Kind = "texts" if is_text(entry) else "times" if is_time(entry) else "numbers"
            if not (pa.types.is_floating(entry) or pa.types.is_null(entry)):
                held.setdefault(word, f"{path}, column {name}: holds {kind}")
    if "numbers" in held and "times" in held:
        raise DataError(f"{held['times']}; {held['numbers']}; ids of one table are numbers or times, not both")
    some = any(not pa.types.is_null(_entry(kind)) for name in columns for kind in types[name])
    return next((word for word in ("times", "texts") if word in held), "numbers" if some else None)


def _entry(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column, or of those in its lists."""
    while is_list(kind):
        kind = kind.value_type
    return kind
