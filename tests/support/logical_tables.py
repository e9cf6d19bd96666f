"""A logical table: columns of Python values, drawn by hypothesis, and the right batch for them. Knows no form."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from hypothesis import strategies as st
from numpy.typing import NDArray

Role = Literal["id", "list", "weights", "dense", "label", "weight", "time", "entries", "numbers"]
Type = Literal["text", "bytes", "whole", "bool", "date", "time", "number", "uuid", "null"]

MISSING_TEXTS = ("", "?", "NA", "nan", "NaN", "null")
MARKS = ("-1", "-999.0", "inf")
SEPARATOR = "|"
UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1)
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_TEXTS = [
    "US", "us", "01", "1", "1322.0", "1322", "1322.50", "-1", "-999", "-999.0", "NA", "nan", "é", "日本", "[x]", "1e3",
    "1_000", "true", "True", "0.0", "-0.0", "+5", "0x10", "inf", "a;b", "a,b", "FALSE",
    "6BA7B810-9DAD-11D1-80B4-00C04FD430C8",
]  # fmt: skip
_ODD = [" 1", "1 ", "a b", 'q"uo"te', '"', "", "x" * 70, "nbsp\u00a0", "it's", "[a, b]", "{", "a\tb"]
_BYTES = [b"caf\xe9", b"\xff\xfe\xfd", b"plain", b"1322.0", b" \xe9 ", "é".encode()]


@dataclass(frozen=True)
class LogicalColumn:
    """`values`: a Python value a row, None = missing; in a list column lists. `type`: of a value. `unit`: of times."""

    name: str
    role: Role
    type: Type
    values: Sequence[Any]
    unit: str = "us"
    zone: bool = False
    owner: str = ""
    """Of weights: the column of their ids. Of entries and numbers: their sequence."""

    @property
    def is_list(self) -> bool:
        return self.role in ("list", "weights", "entries", "numbers")

    def entries(self) -> list[Any]:
        return [e for row in self.values for e in row or ()] if self.is_list else list(self.values)


@dataclass(frozen=True)
class LogicalSequence:
    """A group of list columns. `tables`: that of each column of entries. `first`: the newest entry comes first."""

    name: str
    tables: Mapping[str, str]
    max_length: int
    first: bool

    def newest(self, rows: Sequence[Any]) -> list[list[Any]]:
        """The entries that are kept of each row, oldest first."""
        lists = [list(row or ())[:: -1 if self.first else 1] for row in rows]
        return [row[-self.max_length :] for row in lists]


@dataclass(frozen=True)
class LogicalTable:
    """Columns of equal length. `label`: settings of the label column. `marks`: whether numbers mean a missing value."""

    columns: Sequence[LogicalColumn]
    label: dict[str, Any]
    positive: Sequence[float]
    """Of each row, what its label means."""
    marks: bool
    sequences: Sequence[LogicalSequence] = ()
    own_marks: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Values that mean a missing one in one column."""
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of features that have the table of another one."""

    def __len__(self) -> int:
        return len(self.positive)

    def of(self, *roles: Role) -> list[LogicalColumn]:
        return [column for column in self.columns if column.role in roles]

    def column(self, name: str) -> LogicalColumn:
        return next(column for column in self.columns if column.name == name)

    def missing(self, name: str = "") -> tuple[str, ...]:
        """The marks of a column, or of all."""
        return (*MISSING_TEXTS, *(MARKS if self.marks else ()), *self.own_marks.get(name, ()))


# The right batch


def text_of(value: Any, column: LogicalColumn) -> bytes:
    """A value as a text, as a person or Arrow's CSV writer writes it."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, float) and value.is_integer() and str(value) != "-0.0":
        return b"%d" % value
    if isinstance(value, int) and column.type == "time":
        return stamp(value, column).encode()
    if isinstance(value, datetime.date):
        return value.isoformat().encode()
    return str(value).encode()


def stamp(count: int, column: LogicalColumn) -> str:
    """A time, which is held as a count of its unit since 1970."""
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[column.unit]
    whole, part = divmod(count, 10**digits)
    text = (EPOCH + datetime.timedelta(seconds=whole)).isoformat(" ")
    return text + (f".{part:0{digits}}" if digits else "") + ("Z" if column.zone else "")


def micros_of(value: Any, column: LogicalColumn) -> int:
    """A time or a date as whole microseconds since 1970; the digits behind them are cut."""
    if isinstance(value, datetime.date):
        return int((value - EPOCH.date()).days) * 86_400_000_000
    micros = value * 10**6 // PER_SECOND[column.unit]
    return int(micros)


def is_missing(value: Any, column: LogicalColumn, table: LogicalTable) -> bool:
    """Whether a value means a missing one."""
    if value is None:
        return True
    if column.type in ("date", "time"):
        return False
    marks = [canonical(each.encode()) for each in table.missing(column.name)]
    text = canonical(text_of(value, column))
    return text in marks or _number(text) in [number for each in marks if (number := _number(each)) is not None]


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if b"_" in text or number != number else number


def canonical(text: bytes) -> bytes:
    """The text of a category by which its spellings are one."""
    text = text.strip(b" \t\n\v\f\r")
    if text.lower() in (b"true", b"false"):
        return b"%d" % (text.lower() == b"true")
    head, dot, tail = text.partition(b".")
    digits = head.removeprefix(b"-")
    if dot and tail and not tail.strip(b"0") and digits.isdigit() and (digits == b"0" or digits[:1] != b"0"):
        return b"0" if digits == b"0" else head
    with suppress(ValueError):
        if len(text) == 36 and str(uuid.UUID(text.decode())) == text.decode().lower():
            return text.lower()
    return text


MISSING_ID = int(np.uint64(xxhash.xxh3_64_intdigest(b"")).view(np.int64))


def id_of(value: Any, column: LogicalColumn, table: LogicalTable, kind: str) -> int:
    """The id of a category where training has seen texts, numbers or times."""
    if is_missing(value, column, table):
        return MISSING_ID
    if kind == "texts":
        text = canonical(text_of(value, column))
        return int(np.uint64(xxhash.xxh3_64_intdigest(text)).view(np.int64))
    if kind == "times":
        return micros_of(value, column)
    return int(np.uint64(int(value) % 2**64).view(np.int64))


def ids_of(column: LogicalColumn, table: LogicalTable, kind: str) -> tuple[NDArray[np.int64], list[int] | None]:
    """The ids of all rows, and how many each row has; None = one."""
    if not column.is_list:
        return np.array([id_of(value, column, table, kind) for value in column.values], np.int64), None
    rows = [[v for v in row or () if not is_missing(v, column, table)] for row in column.values]
    return np.array([id_of(v, column, table, kind) for row in rows for v in row], np.int64), [len(r) for r in rows]


def entries_of(
    column: LogicalColumn, table: LogicalTable, group: LogicalSequence, kind: str
) -> tuple[NDArray[np.int64], list[int]]:
    """The ids of the entries that are kept, a missing one too, and how many each row has."""
    rows = group.newest(column.values)
    return np.array([id_of(v, column, table, kind) for row in rows for v in row], np.int64), [len(r) for r in rows]


def weights_of(column: LogicalColumn, ids: LogicalColumn, table: LogicalTable) -> NDArray[np.float32]:
    """The weights of the ids that are not missing."""
    pairs = zip(column.entries(), ids.entries(), strict=True)
    return np.array([float(weight) for weight, value in pairs if not is_missing(value, ids, table)], np.float32)


def dense_of(column: LogicalColumn, table: LogicalTable) -> NDArray[np.float64]:
    """Raw numbers, of lists those of all entries, a time in seconds; nan = missing."""
    found = []
    for value in column.entries():
        if is_missing(value, column, table):
            found.append(np.nan)
        elif column.type in ("time", "date"):
            found.append(micros_of(value, column) / 1e6)
        else:
            found.append(float(value))
    return np.array(found, np.float64)


def scaled(raw_N: NDArray[np.float64], scale: str) -> NDArray[np.float64] | None:
    """The inputs that numbers become, by their own mean and deviation; None = they are constant, and count as 0."""
    shaped_N = np.sign(raw_N) * np.log1p(np.abs(raw_N)) if scale == "log" else raw_N
    known_N = raw_N[~np.isnan(raw_N)]
    if len(set(known_N.tolist())) <= 1:
        return None
    fill = known_N.mean()
    filled_N = np.where(np.isnan(raw_N), np.sign(fill) * np.log1p(abs(fill)) if scale == "log" else fill, shaped_N)
    return (filled_N - fill) / (known_N.std() or 1.0) if scale == "standard" else filled_N


def separators_of(table: LogicalTable, separated: Callable[[LogicalColumn], bool]) -> dict[str, str | None]:
    """The separator of each list and sequence, by its name. `separated`: whether the texts of a column have one."""
    lists = {c.owner or c.name: c for c in table.of("list", "entries")}
    return {name: SEPARATOR if separated(column) else None for name, column in lists.items()}


def data_settings(table: LogicalTable, paths: Sequence[Path], separators: Mapping[str, str | None]) -> dict[str, Any]:
    """The `data` of a job that reads the table from files. `separators`: of lists that are texts."""
    weights = {c.owner: c.name for c in table.of("weights")}
    sparse = [
        {"column": c.name}
        | ({"table": table.tables[c.name]} if c.name in table.tables else {})
        | ({"separator": separators[c.name]} if separators.get(c.name) else {})
        | ({"pooling": "weighted", "weights": weights[c.name]} if c.name in weights else {})
        for c in table.of("id", "list")
    ]
    scales = itertools.cycle(["standard", "none", "log"])
    dense = [{"column": c.name, "scale": next(scales)} for c in table.of("dense")]
    numbers = {g.name: [c.name for c in table.of("numbers") if c.owner == g.name] for g in table.sequences}
    sequences = {
        group.name: {
            "ids": dict(group.tables),
            "numbers": [{"column": name, "scale": next(scales)} for name in numbers[group.name]],
            "max_length": group.max_length,
            "newest": "first" if group.first else "last",
            "separator": separators.get(group.name),
        }
        for group in table.sequences
    }
    return {
        "root": str(paths[0].parent),
        "train": [path.name for path in paths],
        "label": {"column": "label", **table.label},
        "dense": dense,
        "sparse": sparse,
        "sequences": sequences,
        "missing": {"*": list(table.missing()), **table.own_marks} if table.own_marks else list(table.missing()),
    } | {role: c.name for role in ("weight", "time") for c in table.of(role)}  # type: ignore[arg-type]


# Drawing


@st.composite
def tables(draw: st.DrawFn) -> LogicalTable:
    """Any table of 8 to 24 rows, with both classes among its labels."""
    count = draw(st.integers(8, 24))
    marks = draw(st.booleans())
    label, config, positive = draw(_labels(count))
    columns = [label]
    for n in range(draw(st.integers(1, 4))):
        columns.append(
            draw(_column(f"c{n}", "id", count, ["text", "bytes", "whole", "bool", "date", "time", "uuid", "null"]))
        )
    for n in range(draw(st.integers(0, 2))):
        columns += draw(_list(f"l{n}", count))
    for n in range(draw(st.integers(0, 3))):
        columns.append(
            draw(_column(f"d{n}", "dense", count, ["number", "number", "whole", "bool", "time"], infinite=marks))
        )
    if draw(st.booleans()):
        weights = draw(st.lists(st.sampled_from([0.25, 1.0, 2.5, 20.0]), min_size=count, max_size=count))
        columns.append(LogicalColumn("w", "weight", "number", weights))
    if draw(st.booleans()):
        columns.append(draw(_column("at", "time", count, ["time", "number"], gaps=False)))
    sequences = []
    for n in range(draw(st.integers(0, 2))):
        group, lists = draw(_sequence(f"s{n}", count, [c for c in columns if c.role == "id"]))
        sequences.append(group)
        columns += lists
    shared = [
        c.name for c in columns if c.role == "id" and c.type in ("text", "bytes", "whole", "bool", "uuid", "null")
    ]
    some = shared if draw(st.booleans()) and not sequences else []
    own = {c.name: ["1", "US"] for c in columns if c.role in ("id", "dense") and draw(st.integers(0, 4)) == 0}
    return LogicalTable(columns, config, positive, marks, sequences, own, dict.fromkeys(some, "shared"))


@st.composite
def _column(
    draw: st.DrawFn, name: str, role: Role, count: int, types: list[Type], gaps: bool = True, infinite: bool = False
) -> LogicalColumn:
    kind = draw(st.sampled_from(types))
    unit, zone = draw(st.sampled_from(["s", "ms", "us", "ns"])), draw(st.booleans())
    if role == "id" and unit == "ns":
        unit = "us"  # more digits than a category holds are refused
    values = _values(draw, kind, unit, wide=role == "id")
    if infinite and kind == "number":
        values = st.one_of(values, values, values, st.just(float("inf")))
    some = st.one_of(st.none(), values, values, values) if gaps and draw(st.booleans()) else values
    rows = draw(st.lists(some, min_size=count, max_size=count))
    if role == "time" and kind == "number":
        rows = [float(row) if row != -1.0 and row != -999.0 else 3.0 for row in rows]
    return LogicalColumn(name, role, kind, rows, unit, zone)


def _values(draw: st.DrawFn, kind: Type, unit: str, *, wide: bool) -> st.SearchStrategy[Any]:
    if kind == "text":
        letters = st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="|")
        return st.one_of(st.sampled_from([*_TEXTS, *_ODD]), st.text(letters, max_size=6))
    if kind == "bytes":
        return st.sampled_from(_BYTES)
    if kind == "whole":
        limits = [(-100, 100), (0, 200), (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**64 - 1)]
        low, high = draw(st.sampled_from(limits))
        if not wide:
            low, high = max(low, -(2**53)), min(high, 2**53)
        return st.one_of(st.integers(low, high), st.integers(max(low, -1), 5))
    if kind == "bool":
        return st.booleans()
    if kind == "uuid":
        return st.integers(0, 5).map(lambda n: uuid.UUID(int=n * 0x1F3A5C7E9B1D3F5A7C9EB1D3F5A7C9EB % (1 << 128)))
    if kind == "null":
        return st.none()
    if kind == "date":
        return st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))
    if kind == "time":
        per, start = PER_SECOND[unit], 1_700_000_000 * PER_SECOND[unit]
        wide_apart = st.integers(200_000_000 * per, 4_000_000_000 * per)
        return st.one_of(st.integers(start, start + 90 * 86400 * per), wide_apart)
    whole, odd = st.integers(-1000, 1000).map(float), st.sampled_from([-1.0, -999.0, 0.1, 1e-7, 12345678.9, -0.0])
    return st.one_of(whole, st.floats(-1e6, 1e6, allow_nan=False), odd)


_ENTRIES: dict[Type, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["a", "b b", "US", "us", "01", "1322.0", "1322", "é", "-1", "x y"]),
    "whole": st.integers(-2, 50),
}


@st.composite
def _list(draw: st.DrawFn, name: str, count: int) -> list[LogicalColumn]:
    kind: Type = draw(st.sampled_from(["text", "whole"]))
    values = _ENTRIES[kind]
    entry = st.one_of(st.none(), values, values, values) if draw(st.booleans()) else values
    weighted = draw(st.booleans())
    least = 1 if weighted else 0  # a weight for a missing list is another matter
    row = st.lists(entry, min_size=least, max_size=4)
    either = row if weighted else st.one_of(st.none(), row, row)
    rows: list[Any] = draw(st.lists(either, min_size=count, max_size=count))
    rows[0] = [5 if kind == "whole" else "a"]  # a list that is never full has no type
    rows = [None if row is not None and row == [None] else row for row in rows]  # written, they are the same
    if weighted:
        rows = [rows[0] if row is None else row for row in rows]  # a missing field has no weights
    columns = [LogicalColumn(name, "list", kind, rows)]
    if weighted:
        weight = st.sampled_from([0.5, 1.0, 2.0, 0.25])
        weights = [draw(st.lists(weight, min_size=len(row), max_size=len(row))) for row in rows]
        columns.append(LogicalColumn(f"{name}_w", "weights", "number", weights, owner=name))
    return columns


@st.composite
def _sequence(
    draw: st.DrawFn, name: str, count: int, ids: Sequence[LogicalColumn]
) -> tuple[LogicalSequence, list[LogicalColumn]]:
    """Lists that have one length in each row. A column of entries shares the table of one of `ids` of its type, or has
    one of its own."""
    lengths = [2, *draw(st.lists(st.integers(0, 6), min_size=count - 1, max_size=count - 1))]
    absent = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    columns, tables = [], {}
    for n in range(draw(st.integers(1, 2))):
        kind: Type = draw(st.sampled_from(["text", "whole"]))
        shared = [c.name for c in ids if c.type == kind]
        column = f"{name}_{n}"
        tables[column] = draw(st.sampled_from([*shared, f"{column}_table"]))
        columns.append((column, "entries", kind, _ENTRIES[kind], 5 if kind == "whole" else "a"))
    for n in range(draw(st.integers(0, 2))):
        number: Type = draw(st.sampled_from(["number", "whole"]))
        values = st.integers(-2, 50) if number == "whole" else st.sampled_from([0.5, 1.25, -1.0, 1e-7, 40.5, 0.1])
        columns.append((f"{name}_{n}_number", "numbers", number, values, 7 if number == "whole" else 0.5))
    found = []
    for at, (column, role, kind, values, safe) in enumerate(columns):
        entry = st.one_of(st.none(), values, values, values) if draw(st.booleans()) else values
        rows: list[Any] = [draw(st.lists(entry, min_size=n, max_size=n)) for n in lengths]
        rows[0] = [safe, safe]  # a list that is never full has no type
        for row, length in zip(rows, lengths, strict=True):
            if length == 1 and not at:
                row[0] = safe  # written, a list of missing entries alone is a missing list
        rows = [None if not row and gone else row for row, gone in zip(rows, absent, strict=True)]
        found.append(LogicalColumn(column, role, kind, rows, owner=name))
    return LogicalSequence(name, tables, draw(st.integers(1, 7)), draw(st.booleans())), found


@st.composite
def _labels(draw: st.DrawFn, count: int) -> tuple[LogicalColumn, dict[str, Any], list[float]]:
    """The label, its settings, and what each row's label means."""
    which = draw(st.sampled_from(["01", "stars", "above", "texts", "number", "bool"]))

    def rows(values: list[Any]) -> list[Any]:
        more = draw(st.lists(st.sampled_from(values), min_size=count - len(values), max_size=count - len(values)))
        return [*values, *more]

    if which == "stars":
        stars = rows([0.5, 3.5, 4.0, 4.5, 5.0])
        found = [float(value in (4.0, 4.5, 5.0)) for value in stars]
        return LogicalColumn("label", "label", "number", stars), {"positive": [4, 4.5, 5]}, found
    if which == "above":
        plays = rows([0.0, 5000.0, 5000.5, 123456.0])
        found = [float(value > 5000) for value in plays]
        return LogicalColumn("label", "label", "number", plays), {"positive": {"above": 5000}}, found
    if which == "texts":
        words = rows(["yes", "no", " yes", "Yes", "1"])
        found = [float(word.strip() == "yes") for word in words]
        return LogicalColumn("label", "label", "text", words), {"positive": ["yes"]}, found
    if which == "number":
        numbers = rows([0.0, 1.5, 250.0, 0.1])
        return LogicalColumn("label", "label", "number", numbers), {"kind": "number"}, numbers
    kind: Type = "bool" if which == "bool" else "whole"
    values = rows([True, False] if which == "bool" else [0, 1])
    return LogicalColumn("label", "label", kind, values), {}, [float(value) for value in values]
