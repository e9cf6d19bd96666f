"""Parquet of every type and make: read to the digit, or refused by one line with file, row and column."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from tests.support.cases import every
from tests.support.data_files import read, refusal

DAY = datetime.date(1970, 1, 1), datetime.date(1970, 1, 2)

UNWRITTEN = [pa.list_(pa.int64(), 1), pa.large_list_view(pa.int64())]
"""pyarrow 24 does not write those, or not where lists are missing."""
LISTS: dict[str, Any] = {
    **{str(kind): pa.array([[0], [1], None, [1]], kind)
       for kind in (pa.list_(pa.int64()), *([] if pa.__version__.startswith("24.") else UNWRITTEN))},
    "list of int8 with nulls": pa.array([[0, None], [1], [None], [1]], pa.list_(pa.int8())),
    "list of decimals": pa.array([[Decimal(0)], [Decimal(1)], None, [Decimal(1)]]),
    "list of floats": pa.array([[0.0], [1.0], [], [1.0, float("nan")]]),
    "list of dates": pa.array([[DAY[0]], [DAY[1]], None, [DAY[1]]]),
    "list of truth values": pa.array([[False], [True], None, [True]]),
}  # fmt: skip
NESTED: dict[str, Any] = {
    "list of lists": pa.array([[[0]], [[1]], None, [[1]]]),
    "list of structs": pa.array([[{"a": 0}], [{"a": 1}], None, []]),
    "struct": pa.array([{"a": 0}, {"a": 1}, None, {"a": 1}]),
    "map": pa.array([[("a", 0)], [("b", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "fixed bytes": pa.array([b"0", b"1", None, b"1"], pa.binary(1)),
}
SPANS = {
    pa.time32("ms"): 1e-3, pa.time64("us"): 1e-6, pa.time64("ns"): 1e-9, pa.duration("s"): 1.0, pa.duration("ns"): 1e-9,
}  # fmt: skip
"""Times of day and durations: in seconds, what a 1 is."""
DENSE = {"dense": [{"column": "v", "fill": -5.0}]}
SPARSE = {"sparse": ["v"]}
LABEL = {"label": {"column": "v", "missing": "skip"}, "dense": ["x"]}
ROWS = {"x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]}


def _file(columns: dict[str, Any] | Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), sink, **options)
    return bytes(sink.getvalue())


def _with(values: Any) -> dict[str, Any]:
    return {"a.parquet": {**ROWS, "v": values}}


@every(("kind", "unit"), SPANS.items())
def test_a_span_of_time_is_a_number_of_seconds_and_a_category_of_microseconds(
    tmp_path: Path, kind: Any, unit: float
) -> None:
    files, fine = _with(pa.array([0, 1, None, 1], kind)), unit == 1e-9
    rows = read(tmp_path, files, **DENSE, **({} if fine else SPARSE))
    assert rows.dense == [[0.0], [one := 0.0 if fine else float(np.float32(unit))], [-5.0], [one]]
    assert fine or rows.ids["v"] == [0, round(unit * 1e6), MISSING_ID, round(unit * 1e6)]


@every("kind", LISTS)
def test_lists_of_any_type_are_multi_valued(tmp_path: Path, kind: str) -> None:
    one = 86_400_000_000 if kind == "list of dates" else 1
    assert read(tmp_path, _with(LISTS[kind]), **SPARSE).ids["v"] == [[0], [one], [], [one]]


@every(("kind", "role"), [*((k, r) for k in (*LISTS, *NESTED) for r in (DENSE, LABEL)), *((k, SPARSE) for k in NESTED)])
def test_nested_values_are_no_numbers_and_no_categories(tmp_path: Path, kind: str, role: dict[str, Any]) -> None:
    line = refusal(tmp_path, _with((LISTS | NESTED)[kind]), **role)
    allowed = "" if role is SPARSE else "numbers"
    assert re.search(f"a.parquet, column v: (holds .*; allowed: {allowed}|is a (list of )?struct)", line), line


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an infinite number": ([0.0, 1.0, float("inf"), 1.0], DENSE, "row 3, column v: is infinite"),
    "a number beyond float32": ([0.0, 1.0, 1e39, 1.0], DENSE, "row 3, column v: is beyond float32"),
    "a large decimal": (pa.array([Decimal(10) ** 50] * 4), DENSE, "row 1, column v: is beyond float32"),
    "a text that is no number": (["0", "1", "two", "3"], DENSE, "row 3, column v: 'two' is not a number"),
    "a fraction as an id": ([0.0, 1.0, 1.5, 2.0], SPARSE, "row 3, column v: 1.5 is not a whole number"),
    "an infinite id": ([0.0, 1.0, -float("inf"), 2.0], SPARSE, "row 3, column v: -inf is not a whole number"),
    "an id that is too large for its type": ([0.0, 1.0, 1e17, 2.0], SPARSE, "row 3, .* has lost digits"),
    "an id of 25 digits": (pa.array([Decimal(10) ** 25] * 4), SPARSE, r"column v: .1.* no whole number of 64 bits"),
    "a price as an id": (pa.array([Decimal("9.99")] * 4), SPARSE, "row 1, column v: '9.99' is no whole"),
    "a fraction in a list": ([[0.0], [1.0], [1.0, 2.5], []], SPARSE, "row 3, column v: 2.5 is not a whole"),
    "a date as a label": ([DAY[1], datetime.date(2024, 1, 1)] * 2, LABEL, "column v: holds date32.*numbers"),
    "half a microsecond": (
        pa.array([0, 1, 2, 3], pa.timestamp("ns")), SPARSE, "column v: holds timestamp.ns.*lose data"
    ),
    "a float32 that is too large": (
        pa.array([0.0, 1.0, 2.0**24 + 2, 2.0], pa.float32()), SPARSE,
        "row 3, column v: 16777218 has lost digits as float; store the column as int64",
    ),
    "20 digits": (pa.array([2**63] * 4, pa.decimal128(20, 0)), SPARSE, "column v: .*not in range"),
    "a separator of numbers": (
        [1, 2, 3, 4], {"sparse": [{"column": "v", "separator": ";"}]}, "holds int64; allowed: texts"
    ),
    **{
        f"a separator of lists in {key}": ([[1], [2], [3], [4]], {key: value}, "v: separator: ';' has no effect")
        for key, value in {
            "sparse": [{"column": "v", "separator": ";"}],
            "sequences": {"seen": {"ids": {"v": "t"}, "max_length": 2, "separator": ";"}},
        }.items()
    },
}  # fmt: skip


@every("case", WRONG)
def test_a_wrong_value_is_named(tmp_path: Path, case: str) -> None:
    values, settings, why = WRONG[case]
    line = refusal(tmp_path, _with(values), **settings)
    assert re.search(why, line), line


EXACT: dict[str, tuple[Any, list[Any]]] = {
    "the largest exact float": (pa.array([2.0**53, -(2.0**53), 0.0, -0.0]), [2**53, -(2**53), 0, 0]),
    "decimals": (
        pa.array([Decimal(10**18 + n) for n in range(4)], pa.decimal128(38, 10)),
        [10**18 + n for n in range(4)],
    ),
    "decimals of 64 bits": (
        pa.array([Decimal(2**63 - 1), Decimal(-(2**63)), None, Decimal(7)], pa.decimal256(50, 0)),
        [2**63 - 1, -(2**63), MISSING_ID, 7],
    ),
    "nanoseconds": (
        pa.array([1_700_000_000_000_001_000, 1_700_000_000_000_002_000, 0, None], pa.timestamp("ns")),
        [1_700_000_000_000_001, 1_700_000_000_000_002, 0, MISSING_ID],
    ),
    "long texts": (
        ["x" * 70_000, "x" * 70_001, "", " "],
        [hash_text(b"x" * 70_000), hash_text(b"x" * 70_001), MISSING_ID, MISSING_ID],
    ),
    "lists of many ids": ([list(range(3000)), [], [5], None], [list(range(3000)), [], [5], []]),
    "lists of nothing": (pa.array([[None], [], None, [None]]), [[], [], [], []]),
}  # fmt: skip


@every("case", EXACT)
def test_no_digit_of_an_id_is_lost(tmp_path: Path, case: str) -> None:
    values, expected = EXACT[case]
    assert read(tmp_path, _with(values), **SPARSE).ids["v"] == expected


GOOD = _file({**ROWS, "v": [1, 2, 3, 4]})
NO_TABLES: dict[str, tuple[bytes, str]] = {
    "no parquet": (b"x,y\n1,0\n", "cannot be read as parquet"),
    "a magic only": (b"PAR1PAR1", "cannot be read as parquet"),
    "an encrypted footer": (b"PARE" + GOOD[4:-4] + b"PARE", "cannot be read as parquet"),
    "a wrong length of the footer": (GOOD[:-8] + b"\xff\xff\xff\x7f" + GOOD[-4:], "cannot be read as parquet"),
    "no rows": (_file(pa.table({k: pa.array([], pa.int64()) for k in "xyv"})), "has no rows"),
    "no columns": (_file(pa.table({})), "has no column"),
    "another name": (_file({**ROWS, "V": [1, 2, 3, 4]}), "has no column v; did you mean|has no column v; it has"),
    "a column twice": (
        _file(pa.Table.from_arrays([pa.array([0, 1])] * 4, names=["x", "y", "v", "v"])), "columns are called v"
    ),
}  # fmt: skip


@every("case", NO_TABLES)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, why = NO_TABLES[case]
    line = refusal(tmp_path, {"a.parquet": content}, **SPARSE)
    assert str(tmp_path / "a.parquet") in line and re.search(why, line), line


@every("name", ["v.a", "v.list.element", "a b", "größe", "v\n", "#"])
def test_a_column_of_any_name_is_found(tmp_path: Path, name: str) -> None:
    columns = {**ROWS, name: [5, 6, 7, 8], "v": [1, 2, 3, 4], "s": [{"v": 9}] * 4}
    rows = read(tmp_path, {"a.parquet": columns}, sparse=[{"column": name}, "v"])
    assert (rows.ids[name], rows.ids["v"]) == ([5, 6, 7, 8], [1, 2, 3, 4])


@every(
    ("values", "why"),
    [
        (pa.array(["5", "six"]), "row 2, column v: 'six' is no whole number"),
        (pa.array([5, 6], pa.timestamp("s")), "column v: holds timestamp.*; allowed: numbers"),
        (pa.array([[5], [6]]), "column v: holds list.*; allowed: one value per row, as in the rows before"),
    ],
)
def test_an_evaluation_file_of_another_kind_is_refused(tmp_path: Path, values: Any, why: str) -> None:
    files = {"a.parquet": {"v": [1, 2], "y": [0, 1]}, "b.parquet": {"v": values, "y": [0, 1]}}
    line = refusal(tmp_path, files, **SPARSE, eval="b.parquet")
    assert re.search(f"b.parquet, {why}", line), line


def test_a_changed_byte_of_a_page_with_a_checksum_is_refused(tmp_path: Path) -> None:
    columns = {
        "x": np.random.default_rng(5).normal(size=200),
        "v": [f"v{i % 9}" for i in range(200)],
        "l": [[i, i + 1][: i % 3] for i in range(200)],
    }
    good = _file({**columns, "y": [0, 1] * 100}, row_group_size=70, write_page_checksum=True)
    roles: dict[str, Any] = {"dense": ["x"], "sparse": ["v", "l"]}
    metadata = pq.ParquetFile(pa.BufferReader(good)).metadata
    chunks = [metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(4)]
    assert len(chunks) == 12
    for chunk in chunks:
        bad = bytearray(good)
        begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        bad[begin + chunk.total_compressed_size - 1] ^= 1  # the last byte of its last page
        assert "a.parquet" in refusal(tmp_path, {"a.parquet": bytes(bad)}, **roles)


STRUCTS = pa.array([{"id": 1, "city": "a"}, {"id": 2, "city": "b"}, None, {"id": 1, "city": None}])
EVENTS = pa.array([[{"item": 1, "ms": 5}], [], None, [{"item": 2, "ms": 6}]])


@every(
    ("settings", "why"),
    [
        ({"sparse": ["user"]}, r"column user: is a struct with the fields id, city; flatten it .* as user.id"),
        ({"sparse": ["user.id"]}, r"column user: is a struct with the fields id, city; flatten it"),
        ({"label": "user.id", "sparse": ["x"]}, "column user: is a struct with the fields id, city; flatten it"),
        ({"sparse": ["events"]}, "column events: is a list of structs with the fields item, ms; make a list column of"),
        ({"sparse": ["events.item"]}, "column events: is a list of structs with the fields item, ms"),
        ({"sparse": ["*"]}, "column user: is a struct"),
        ({"sparse": ["usr.id"]}, "has no column usr.id"),
    ],
)  # fmt: skip
def test_structs_are_refused_with_the_way_out(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    files = {"a.parquet": {"user": STRUCTS, "events": EVENTS, "x": [1, 2, 3, 4], "y": [0, 1, 0, 1]}}
    assert re.search(why, refusal(tmp_path, files, **settings))


def test_of_a_folder_only_parquet_files_are_read(tmp_path: Path) -> None:
    files = {"a.parquet": {"x": [1, 2], "y": [0, 1]}, "job.yaml": "name: a\n"}
    assert len(read(tmp_path, files, dense=["*"], train=".").labels) == 2
    (tmp_path / "a.parquet").unlink()
    line = refusal(tmp_path, source="parquet", train=".", dense=["x"])
    assert re.search(r"has no parquet files, only job\.yaml", line), line
