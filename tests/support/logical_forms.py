"""A logical table in every form: files, frames, lists of dicts and requests. `choose` decides among equal writings."""

from __future__ import annotations

import datetime
import importlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.inference.protocol.datatypes import NUMBERS, Values, pack
from shardkeep.proto import inference_pb2 as pb
from shardkeep.workers.data.conversion.chunk import plain
from tests.support.logical_tables import EPOCH, PER_SECOND, SEPARATOR, UTC, LogicalColumn, LogicalTable, stamp, text_of
from tests.support.serving import datatype_of

LARGEST_EXACT = 2**53
Choose = random.Random


@dataclass(frozen=True)
class Written:
    """What a form holds, and how each column is written: text, whole, float, decimal, bool, date, time or count."""

    data: Any
    ways: Mapping[str, str]


def optional(module: str) -> Any:
    """A module that need not be installed, or None."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


# Texts


def field(value: Any, column: LogicalColumn, choose: Choose, *, floats: bool = False) -> bytes:
    """A value in a CSV. `floats`: whole numbers as pandas writes a column of them that has gaps."""
    if value is None:
        return choose.choice([b"", b"NA", b"nan"])
    if floats:
        return str(float(value)).encode()
    if column.type == "time" and column.role != "id":  # of a category, each writing is one of its own
        text = stamp(value, column)
        text = text.replace("Z", choose.choice(["Z", " UTC", "+00:00"]))
        return text.replace(" ", choose.choice([" ", "T"]), 1).encode()
    if column.type in ("bool", "uuid"):
        return spelled(text_of(value, column), choose)
    return text_of(value, column)


def spelled(text: bytes, choose: Choose) -> bytes:
    """A truth value or a UUID in one of its spellings."""
    more = {b"true": [b"True", b"1"], b"false": [b"False", b"0", b"0.0"]}.get(text, [])
    return choose.choice([text, text.upper(), *more])


def texts(column: LogicalColumn, choose: Choose, *, floats: bool = False) -> list[bytes]:
    """The fields of all rows; the entries of a list behind each other."""
    whole = [value for value in column.entries() if isinstance(value, int)]
    floats = floats and column.type == "whole" and all(abs(value) <= LARGEST_EXACT for value in whole)
    if not column.is_list:
        return [field(value, column, choose, floats=floats) for value in column.values]
    return [
        SEPARATOR.encode().join(field(v, column, choose) if v is not None else b"" for v in row or ())
        for row in column.values
    ]


def write_csv(
    table: LogicalTable, path: Path, choose: Choose, *, delimiter: str = ",", floats: bool = False
) -> Written:
    columns = {c.name: texts(c, choose, floats=floats) for c in table.columns}
    mark = delimiter.encode()

    def quoted(text: bytes) -> bytes:
        special = mark in text or b'"' in text or (text[:1] != b"" and choose.random() < 0.1)
        return b'"' + text.replace(b'"', b'""') + b'"' if special else text

    lines = [mark.join(name.encode() for name in columns)]
    lines += [mark.join(map(quoted, row)) for row in zip(*columns.values(), strict=True)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return Written(path, dict.fromkeys(columns, "text"))


# Arrow


def arrow(column: LogicalColumn, kind: pa.DataType) -> pa.Array:
    """The column as an Arrow array of that type, or as a list array of it."""

    def value(v: Any) -> Any:
        if v is None:
            return None
        if column.type == "uuid":
            return str(v) if kind in (pa.string(), pa.large_string()) else v.bytes
        if column.type == "time" and pa.types.is_timestamp(kind):
            return np.datetime64(v, column.unit)
        if pa.types.is_decimal(kind):
            return Decimal(str(v))
        if pa.types.is_floating(kind):
            return float(v)
        return int(v) if pa.types.is_integer(kind) else v

    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, arrow(column, kind.storage_type))
    if not column.is_list:
        if column.type == "time":
            counts = pa.array(column.values, pa.int64())
            return counts.cast(pa.timestamp(column.unit)).cast(pa.timestamp(kind.unit)).cast(kind)
        if pa.types.is_dictionary(kind):
            return pa.array(column.values, kind.value_type).dictionary_encode()
        return pa.array([value(v) for v in column.values], kind)
    rows = [None if row is None else [value(v) for v in row] for row in column.values]
    return pa.array(rows, pa.list_(kind))


def arrow_types(column: LogicalColumn) -> list[tuple[pa.DataType, str]]:
    """Types that hold all values exactly, and how each writes them."""
    values = [v for v in column.entries() if v is not None]
    if column.type == "text":
        kinds = [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
        return [(kind, "text") for kind in (kinds[:3] if column.is_list else [*kinds, pa.json_(pa.string())])]
    if column.type == "uuid":
        return [(kind, "text") for kind in (pa.string(), pa.large_string(), pa.binary(16), pa.uuid())]
    if column.type == "null":
        return [(kind, "text") for kind in (pa.null(), pa.string(), pa.float64())]
    if column.type == "bytes":
        return [(kind, "text") for kind in (pa.binary(), pa.large_binary(), pa.binary_view())]
    if column.type == "bool":
        return [(pa.bool_(), "bool"), (pa.bool8(), "bool")]
    if column.type == "date":
        return [(pa.date32(), "date"), (pa.date64(), "date")]
    if column.type == "time":
        finer = ["s", "ms", "us", "ns"]
        most = max((abs(v) for v in values), default=0) / PER_SECOND[column.unit]
        units = [unit for unit in finer[finer.index(column.unit) :] if unit != "ns" or most < 9e9]
        return [(pa.timestamp(unit, "UTC" if column.zone else None), "time") for unit in units]
    return _number_types(column, values)


def _number_types(column: LogicalColumn, values: Sequence[Any]) -> list[tuple[pa.DataType, str]]:
    kinds: list[tuple[pa.DataType, str]] = []
    infinite, values = float("inf") in values, [v for v in values if v != float("inf")]
    whole = column.type == "whole" or (not infinite and all(v == int(v) and str(v) != "-0.0" for v in values))
    low, high = min(values, default=0), max(values, default=0)
    if whole and column.role != "weights":
        for bits in (8, 16, 32, 64):
            if -(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1):
                kinds.append((getattr(pa, f"int{bits}")(), "whole"))
            if low >= 0 and high < 2**bits:
                kinds.append((getattr(pa, f"uint{bits}")(), "whole"))
    if whole and not infinite and low >= -(2**63) and high < 2**63:
        kinds += [(kind, "decimal") for kind in [pa.decimal128(22, 2), pa.decimal256(60, 5)][: 2 - column.is_list]]
    if all(abs(v) <= LARGEST_EXACT for v in values):
        kinds.append((pa.float64(), "float"))
    if all(abs(v) <= 2**24 and float(np.float32(v)) == v for v in values):
        kinds.append((pa.float32(), "float"))
    if not column.is_list and all(abs(v) <= 2**11 and float(np.float16(v)) == v for v in values):
        kinds.append((pa.float16(), "float"))
    return kinds


def coded(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), "uint32"), values)


def runs(values: pa.Array) -> pa.Array:
    longer = pa.concat_arrays([values.slice(0, 1), values])
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(longer) + 1), pa.int16()), longer).slice(1)


def listed(values: pa.Array, change: Callable[[Any], Any], *, view: bool = False) -> pa.Array:
    """A list array with other entries, of list views where `view`; any other array as it is."""
    if not pa.types.is_list(values.type):
        return values
    lengths_N, missing = [len(row or ()) for row in values.to_pylist()], values.is_null()
    offsets, entries = pa.array(np.cumsum([0, *lengths_N]), pa.int32()), change(values.flatten())
    if view:
        return pa.ListViewArray.from_arrays(offsets[:-1], pa.array(lengths_N, pa.int32()), entries, mask=missing)
    return pa.ListArray.from_arrays(offsets, entries, mask=missing)


ENCODINGS: list[Callable[[pa.Array], Any]] = [
    coded,
    lambda values: pa.chunked_array([coded(values[:1]), coded(values[1:])]),
    lambda values: runs(coded(values)),
    lambda values: pa.chunked_array([runs(values), runs(values)[:0]]),
    lambda values: listed(values, runs),
    lambda values: listed(values, coded, view=True),
    lambda values: runs(listed(values, coded)),
]


def encoded_table(table: LogicalTable, choose: Choose) -> Written:
    """Arrow as many programs hand it over: dictionaries, runs and views."""
    content, ways = typed(table, choose)
    columns = {}
    for name, column in zip(content.column_names, content.columns, strict=True):
        values = column.combine_chunks()
        is_plain = not pa.types.is_dictionary(values.type) and not isinstance(values, pa.ExtensionArray)
        columns[name] = choose.choice(ENCODINGS)(values) if is_plain else values
    return Written(pa.table(columns), ways)


def typed(table: LogicalTable, choose: Choose, *, strings: bool = False) -> tuple[pa.Table, dict[str, str]]:
    """The columns with types that `choose` picks. `strings`: all of them as texts or bytes, as a CSV has them."""
    columns, ways = {}, {}
    for column in table.columns:
        if strings:
            fields = texts(column, choose)
            plain = column.type == "bytes"
            kind = choose.choice(
                [pa.binary(), pa.large_binary()] if plain else [pa.string(), pa.large_string(), pa.binary()]
            )
            columns[column.name], ways[column.name] = pa.array(fields, pa.binary()).cast(kind), "text"
        else:
            kind, way = choose.choice(arrow_types(column))
            columns[column.name], ways[column.name] = arrow(column, kind), way
    return pa.table(columns), ways


def write_parquet(table: LogicalTable, path: Path, choose: Choose, *, strings: bool = False) -> Written:
    content, ways = typed(table, choose, strings=strings)
    for at, column in enumerate(content.columns if choose.random() < 0.3 else ()):
        views = listed(column.combine_chunks(), lambda values: values, view=True)
        content = content.set_column(at, content.column_names[at], views)
    pq.write_table(content, path, row_group_size=choose.choice([5, 1000]))
    return Written(path, ways)


def write_halves(table: LogicalTable, folder: Path, choose: Choose) -> tuple[list[Path], dict[str, str]]:
    """Two files, whose columns may have different types."""
    ways, paths = dict[str, str](), []
    for name, part in (("first", slice(len(table) // 2)), ("second", slice(len(table) // 2, None))):
        columns = [replace(column, values=column.values[part]) for column in table.columns]
        written = write_parquet(replace(table, columns=columns), folder / f"{name}.parquet", choose)
        ways |= {name: way for name, way in written.ways.items() if ways.get(name) != "text"}
        paths.append(written.data)
    return paths, ways


def write_json_lines(table: LogicalTable, path: Path, choose: Choose) -> Written:
    """Lines of JSON, with texts for what it has no values for. Raises UnicodeDecodeError for bytes."""
    ways = {c.name: _WAYS[c.type] for c in table.columns}
    ways = {c.name: way if way in ("whole", "bool", "float") and float("inf") not in c.entries() else "text"
            for c, way in zip(table.columns, ways.values(), strict=True)}  # fmt: skip

    def value(v: Any, column: LogicalColumn) -> Any:
        return v if v is None or ways[column.name] != "text" else field(v, column, choose).decode()

    def cell(v: Any, column: LogicalColumn) -> Any:
        return [value(each, column) for each in v] if column.is_list and v is not None else value(v, column)

    rows = [{c.name: cell(c.values[n], c) for c in table.columns} for n in range(len(table))]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return Written(path, ways)


# Python objects and frames


def python_value(value: Any, column: LogicalColumn) -> Any:
    if value is None or column.type != "time":
        return value
    micros = datetime.timedelta(microseconds=value * 10**6 // PER_SECOND[column.unit])
    return (EPOCH + micros).replace(tzinfo=UTC if column.zone else None)


def python_values(column: LogicalColumn) -> list[Any]:
    if column.is_list:
        return [None if row is None else [python_value(v, column) for v in row] for row in column.values]
    return [python_value(value, column) for value in column.values]


_WAYS = {kind: kind for kind in ("text", "whole", "bool", "date", "time")}
_WAYS |= {"bytes": "text", "number": "float", "uuid": "text", "null": "text"}


def columns_of_lists(table: LogicalTable, choose: Choose) -> Written:
    """A dict of lists, or of arrays of numpy where one holds the values."""
    found: dict[str, Any] = {}
    ways = {column.name: _WAYS[column.type] for column in table.columns}
    for column in table.columns:
        full = None not in column.entries() and None not in column.values
        found[column.name] = python_values(column)
        if full and not column.is_list and column.type in ("whole", "number", "bool") and choose.random() < 0.5:
            found[column.name] = np.array(column.values)
    return Written(found, ways)


def list_of_dicts(table: LogicalTable, choose: Choose) -> Written:
    written = columns_of_lists(table, choose)
    rows = [
        {c.name: written.data[c.name][n] for c in table.columns if c.values[n] is not None or choose.random() < 0.5}
        for n in range(len(table))
    ]
    rows[0] = {c.name: written.data[c.name][0] for c in table.columns}
    return Written(rows, written.ways)


def pandas_frame(table: LogicalTable, choose: Choose) -> Written:
    """With the dtypes of pandas 2 or 3, or the nullable ones."""
    pandas = optional("pandas")
    found, ways = {}, {}
    for column in table.columns:
        dtype, way = choose.choice(_pandas_dtypes(column))
        if dtype.startswith("datetime64"):
            stamps = pandas.Series(
                [None if v is None else np.datetime64(v, column.unit) for v in column.values], dtype=dtype
            )
            found[column.name] = stamps.dt.tz_localize("UTC") if column.zone else stamps
        else:
            found[column.name] = pandas.Series(python_values(column), dtype=dtype)
        ways[column.name] = way
    return Written(pandas.DataFrame(found), ways)


def _pandas_dtypes(column: LogicalColumn) -> list[tuple[str, str]]:
    full = None not in column.values
    if column.is_list or column.type in ("bytes", "date", "uuid", "null"):
        return [("object", _WAYS[column.type])]
    if column.type == "text":
        return [(dtype, "text") for dtype in ("object", "str" if full else "object", "string", "category")]
    if column.type == "time":
        values = [v for v in column.values if v is not None]
        units = [column.unit, *(["us"] if column.unit in ("s", "ms") else [])]
        small = max((abs(v) for v in values), default=0) < {"s": 9e9, "ms": 9e12, "us": 9e15, "ns": 9e18}[column.unit]
        return [(f"datetime64[{unit}]", "time") for unit in [*units, *(["ns"] if small else [])]]
    if column.type == "bool":
        return [("bool", "bool")] if full else [("boolean", "bool"), ("object", "bool")]
    values = [v for v in column.values if v is not None]
    exact = all(abs(v) <= LARGEST_EXACT or v == float("inf") for v in values)
    kinds = [("float64", "float")] if exact else []
    if column.type == "whole" and all(-(2**63) <= v < 2**63 for v in values):
        kinds += [("int64", "whole")] if full else [("Int64", "whole")]
    if column.type == "whole" and all(0 <= v < 2**64 for v in values):
        kinds += [("uint64", "whole")] if full else [("UInt64", "whole")]
    return kinds or [("object", "whole")]


def polars_frame(table: LogicalTable, choose: Choose) -> Written:
    """Through Arrow, with the types that polars has for them."""
    polars = optional("polars")
    content, ways = typed(table, choose)
    for at, name in enumerate(content.column_names):
        kind = content.schema.field(name).type
        if kind == pa.date64():  # a time for polars
            content = content.set_column(at, name, content.column(name).cast(pa.date32()))
        if isinstance(kind, pa.BaseExtensionType) or kind == pa.binary(16):  # it has no such type
            content = content.set_column(at, name, plain(content.column(name)))
        wider = {pa.decimal256(60, 5): pa.decimal128(38, 5), pa.float16(): pa.float32()}.get(kind, kind)
        content = content.set_column(at, name, content.column(name).cast(wider)) if wider != kind else content
    return Written(polars.from_arrow(content), ways)


# Requests


def request_columns(
    table: LogicalTable, choose: Choose, separators: Mapping[str, str | None], kinds: Mapping[str, str]
) -> Written:
    """The inputs of a request by name. `separators`: of the model's lists; None = it takes values and lengths only.
    `kinds`: what the model's categories hold; a count of seconds is no text of a time."""
    found: dict[str, Values] = {}
    ways: dict[str, str] = {}
    for column in table.of("id", "list", "weights", "dense", "entries", "numbers"):
        separator = separators.get(column.owner or column.name)
        if column.is_list and (separator is None or choose.random() < 0.5):
            flat = LogicalColumn(column.name, "id", column.type, column.entries(), column.unit, column.zone)
            values, way = _tensor(flat, choose, counts=False)
            found[f"{column.name}.values"] = values
            found[f"{column.name}.lengths"] = np.array([len(row or ()) for row in column.values], np.int32)
        elif column.is_list:
            found[column.name], way = texts(column, choose), "text"
        else:
            found[column.name], way = _tensor(column, choose, counts=kinds.get(column.name) != "texts")
        ways[column.name] = way
    return Written(found, ways)


def _tensor(column: LogicalColumn, choose: Choose, *, counts: bool) -> tuple[Values, str]:
    present = [v for v in column.values if v is not None]
    ways: list[tuple[Values, str]] = [([b"" if v is None else field(v, column, choose) for v in column.values], "text")]
    full = len(present) == len(column.values)
    if column.type == "bool" and full:
        ways.append((np.array(column.values, np.bool_), "bool"))
    per = PER_SECOND[column.unit]
    if counts and column.type == "time" and full and all(2e8 * per <= v < 9e9 * per for v in present):
        ways.append((np.array(column.values, np.int64), "count"))
    if column.type in ("whole", "number"):
        for dtype in NUMBERS.values():
            if dtype.kind in "iu" and full and all(float(v).is_integer() and str(v) != "-0.0" for v in present):
                info = np.iinfo(dtype)
                if all(info.min <= v <= info.max for v in present):
                    ways.append((np.array([int(v) for v in column.values], dtype), "whole"))
            if dtype.kind == "f" and all(
                v == float("inf") or (abs(v) <= 2 ** np.finfo(dtype).nmant and float(dtype.type(v)) == v)
                for v in present
            ):
                ways.append((np.array([np.nan if v is None else v for v in column.values], dtype), "float"))
    return choose.choice(ways)


def http_json(columns: Mapping[str, Values]) -> tuple[bytes, str | None]:
    """A body, and the length of its head. Raises UnicodeDecodeError for bytes that JSON cannot have."""
    inputs = []
    for name, values in columns.items():
        if isinstance(values, list):
            data: list[Any] = [text.decode() or None for text in values]
        else:
            data = [None if v != v else v for v in values.tolist()]
        inputs.append({"name": name, "datatype": datatype_of(values), "shape": [len(values)], "data": data})
    return json.dumps({"inputs": inputs}).encode(), None


def http_binary(columns: Mapping[str, Values]) -> tuple[bytes, str | None]:
    parts = {name: pack(values) for name, values in columns.items()}
    inputs = [
        {"name": name, "datatype": datatype_of(columns[name]), "shape": [len(columns[name]), 1]}
        | {"parameters": {"binary_data_size": len(part)}}
        for name, part in parts.items()
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return head + b"".join(parts.values()), str(len(head))


_CONTENTS = {"f": "fp{}_contents", "i": "int_contents", "u": "uint_contents"}


def grpc(columns: Mapping[str, Values], *, raw: bool) -> bytes:
    """A message, with raw bytes or with contents; FP16 has no contents, so it is sent as FP32."""
    request = pb.ModelInferRequest(model_name="m")
    for name, values in columns.items():
        if not raw and not isinstance(values, list) and values.dtype == np.float16:
            values = values.astype(np.float32)
        made = request.inputs.add(name=name, datatype=datatype_of(values), shape=[len(values)])
        if raw:
            request.raw_input_contents.append(pack(values))
        elif isinstance(values, list):
            made.contents.bytes_contents.extend(values)
        else:
            kind, size = values.dtype.kind, values.dtype.itemsize
            wide = {"i": "int64_contents", "u": "uint64_contents"}.get(kind, "") if size == 8 else ""
            name_of = "bool_contents" if kind == "b" else wide or _CONTENTS[kind].format(size * 8)
            getattr(made.contents, name_of).extend(values.tolist())
    return request.SerializeToString()


FRAMES: dict[str, Callable[[LogicalTable, Choose], Written]] = {
    "dict of columns": columns_of_lists,
    "list of dicts": list_of_dicts,
    "arrow": encoded_table,
    **({"pandas": pandas_frame} if optional("pandas") else {}),
    **({"polars": polars_frame} if optional("polars") else {}),
}
