"""A value has one form at each entrance, and the types in all training files decide what a column holds."""

from __future__ import annotations

import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.layout import layout_of
from shardkeep.workers.data.conversion.typing import facts_of
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.frames import array_of
from shardkeep.workers.data_config import DataConfig, marks_of
from tests.support.cases import every
from tests.support.data_files import opened, read, refusal

UUID = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
SPELLINGS: list[tuple[str, Any]] = [
    ("1", [True, "true", "TRUE", " True\t", "1.0", 1, 1.0, Decimal("1.00"), np.bool_(True)]),
    ("0", [False, "false", "False", "0.0", "-0.0", 0, -0.0]),
    ("-7", ["-7.00", -7, "-7"]),
    (str(UUID), [UUID, str(UUID), str(UUID).upper(), pa.scalar(UUID.bytes, pa.binary(16))]),
    ("01", ["01"]),
    ("truE.", ["truE."]),
]


@every(("text", "values"), SPELLINGS)
def test_all_spellings_of_a_value_are_one_id_one_mark_and_one_label(
    tmp_path: Path, text: str, values: list[Any]
) -> None:
    other = pa.array(["other", "mark"])
    for n, value in enumerate(values):
        array = pa.array([value.as_py()], value.type) if isinstance(value, pa.Scalar) else array_of([value], "it")
        files = {f"{n}.parquet": {"v": array, "y": [1]}, "b.parquet": {"v": other, "y": [0, 1]}}
        settings: dict[str, Any] = {"train": list(files), "sparse": ["v"]}
        assert read(tmp_path, files, **settings).ids["v"][0] == hash_text(text.encode()), value
        marked = read(tmp_path, files, **settings, missing={"v": [text, "mark"]}).ids["v"]
        assert marked == [MISSING_ID, hash_text(b"other"), MISSING_ID]
        listed = {"label": {"column": "v", "positive": [text]}}
        assert read(tmp_path, files, **settings | listed | {"sparse": [], "dense": ["y"]}).labels == [1.0, 0.0, 0.0]


def two(first: Any, second: Any, **more: Any) -> dict[str, Any]:
    return {
        "a.parquet": {"v": pa.array(first), "y": [0, 1], **more},
        "b.parquet": {"v": pa.array(second), "y": [1, 0], **more},
    }


NULLS, STAMPS = pa.nulls(2), pa.array([0, 10**6], pa.timestamp("us"))
FACTS: list[tuple[Any, Any, Any]] = [
    (pa.array(["a", "7"]), pa.array([7, 8]), ("texts", [b"a", b"7", b"7", b"8"])),
    (pa.array([7, 8]), pa.array(["a", "7.0"], pa.large_string()), ("texts", [b"7", b"8", b"a", b"7"])),
    (pa.array(["a", "b"]), pa.array(["a", "b"]).dictionary_encode(), ("texts", [b"a", b"b"] * 2)),
    (pa.array(["a", "b"], pa.string_view()), pa.array([b"a", b"b"]), ("texts", [b"a", b"b"] * 2)),
    (NULLS, pa.array([7, 8]), ("numbers", [None, None, 7, 8])),
    (pa.array([7, 8]), NULLS, ("numbers", [7, 8, None, None])),
    (pa.array([np.nan, np.nan]), pa.array(["a", "b"]), ("texts", [None, None, b"a", b"b"])),
    (pa.array([np.nan, np.nan]), STAMPS, ("times", [None, None, 0, 10**6])),
    (pa.array(["1970-01-01", "1970-01-02"]), STAMPS, ("times", [0, 86_400 * 10**6, 0, 10**6])),
    (NULLS, pa.array([["a"], ["b", "c"]]), ("texts", [[], [], [b"a"], [b"b", b"c"]])),
    (pa.nulls(2, pa.list_(pa.null())), pa.array([[5], []]), ("numbers", [[], [], [5], []])),
    (pa.array([5, 6]), pa.array([[5], []]), ("numbers", [[5], [6], [5], []])),
]


def ids_of(values: Any) -> Any:
    if isinstance(values, list):
        return [ids_of(value) for value in values]
    return MISSING_ID if values is None else hash_text(values) if isinstance(values, bytes) else values


@every(("first", "second", "expected"), FACTS, ids=[f"{a.type} {b.type}" for a, b, _ in FACTS])
def test_the_types_in_all_files_decide_in_any_order(tmp_path: Path, first: Any, second: Any, expected: Any) -> None:
    kind, values = expected
    files = two(first, second)
    for train in (list(files), list(files)[::-1]):
        data = opened(tmp_path, files, train=train, sparse=["v"])
        assert Inputs.of_json(data.inputs).fitted.kinds["v"] == kind
    assert read(tmp_path, train=list(files), sparse=["v"], source="parquet").ids["v"] == ids_of(values)


def test_columns_of_one_table_are_of_one_kind(tmp_path: Path) -> None:
    columns = {"y": [0, 1], "n": [7, 8], "t": ["7", "x"], "l": [[7], [8]]}
    for table in ({"table": "n"}, {}):
        rows = read(tmp_path, {"a.parquet": columns}, sparse=["n", {"column": "t", **table}])
        assert rows.ids["n"] == (ids_of([b"7", b"8"]) if table else [7, 8]) and rows.ids["t"] == ids_of([b"7", b"x"])
    group = {"sequences": {"s": {"ids": {"l": "t"}, "max_length": 2}}}
    assert read(tmp_path, {"a.parquet": columns}, sparse=["t"], **group).ids["l"] == ids_of([[b"7"], [b"8"]])
    line = refusal(tmp_path, {"a.parquet": columns | {"t": STAMPS}}, sparse=["n", {"column": "t", "table": "n"}])
    assert "column t: holds timestamp[us]" in line and "column n: holds int64; ids of one table are" in line


def test_facts_need_the_types_alone() -> None:
    layout = layout_of(DataConfig.model_validate({"source": "csv", "label": "y", "sparse": ["a", "u"], "dense": ["d"]}))
    kinds: dict[str, Any] = {"a": pa.null(), "u": pa.uuid(), "d": pa.int8()}
    facts = facts_of({"1": pa.schema(kinds), "2": pa.schema({"d": pa.date32()})}, layout)
    assert (facts.kinds, facts.lists, facts.times) == ({"u": "texts"}, frozenset(), {"d": True})


# Zones

NAIVE, ZONED = STAMPS, STAMPS.cast(pa.timestamp("us", "UTC"))


@every(
    ("first", "second"),
    [
        (NAIVE, ZONED),
        (ZONED, NAIVE),
        (pa.array(["2024-05-01", "2024-05-02"]), pa.array(["2024-05-01T00:00Z", None])),
        (ZONED, pa.array([0, 1], pa.date32())),
    ],
)
def test_times_with_and_without_a_zone_are_refused_over_files_sides_and_requests(
    tmp_path: Path, first: Any, second: Any
) -> None:
    files, why = two(first, second, x=[1, 2]), r"b.parquet, row 1, column v: the time has (a|no) zone, and the times"
    for roles in ({"dense": ["v"]}, {"sparse": ["v"]} if pa.types.is_temporal(first.type) else {"dense": ["v"]}):
        for sides in ({"train": list(files)}, {"eval": "b.parquet"}):
            with pytest.raises(DataError, match=why):
                opened(tmp_path, files, **roles, **sides)
        inputs = Inputs.of_json(opened(tmp_path, files, **roles, train="a.parquet").inputs)
        assert Inputs.of_json(inputs.to_json()).fitted.zones == {"v": first.type == ZONED.type}
        with pytest.raises(DataError, match="the data, row 1, column v: the time has"):
            inputs.samples(Chunk("the data", np.arange(1, 3), {"v": second}))
        assert len(inputs.samples(Chunk("the data", np.arange(1, 3), {"v": NULLS}))) == 2
    by_time = {"time": "v", "dense": ["x"], "train": list(files)}
    with pytest.raises(DataError, match=why):
        opened(tmp_path, files, **by_time)


# Marks


@every("form", ["csv", "parquet"])
def test_marks_of_one_column_leave_the_others_and_a_line_counts_what_they_remove(tmp_path: Path, form: str) -> None:
    columns = {"y": ["0", "1", "-1", "1"], "x": [-1.0, float("inf"), 5.0, 5.0], "v": ["-1", "", "NA", "a"]}
    name = f"a.{form}"
    label = {"column": "y", "missing": "skip"}
    settings: dict[str, Any] = {"label": label, "dense": [{"column": "x", "fill": 9.0}], "sparse": ["v"]}
    own = {"y": [-1], "x": [float("inf"), -1]}
    data = opened(tmp_path, {name: columns}, **settings, missing=own)
    assert data.notes[-1] == "data.missing: marks removed values: 1 of y, 2 of x, 1 of v"
    rows = read(tmp_path, {name: columns}, **settings, missing=own)
    assert (rows.dense, rows.ids["v"]) == ([[9.0], [9.0], [5.0]], ids_of([b"-1", None, b"a"]))
    none = opened(
        tmp_path, {name: columns | {"x": [1, 2, 3, 4]}}, **settings | {"label": {"column": "y", "positive": [1]}}
    )
    assert none.notes[-1] == "data.missing: marks removed values: 1 of v"
    assert "is infinite; allowed: finite numbers, or inf and -inf in data.missing" in refusal(
        tmp_path, {name: columns}, **settings, missing={"y": [-1]}
    )
    rounded = pa.array([0.1, 0.2, 0.3], pa.float32())
    marked = opened(tmp_path, {"f.parquet": {"x": rounded, "y": [0, 1, 0]}}, dense=["x"], missing={"x": [0.1]})
    assert marked.notes[-1] == "data.missing: marks removed values: 1 of x"
    with pytest.raises(ConfigError, match=r"data\.missing: z is no column that the job reads"):
        opened(tmp_path, {name: columns}, **settings, missing={"z": ["-"]})


def test_a_columns_own_marks_are_added_to_those_of_all() -> None:
    config = DataConfig.model_validate({"missing": {"x": [-1, "?"]}})
    assert marks_of(config.missing, "x") == (*DataConfig().missing, "-1")
    config = DataConfig.model_validate({"missing": {"x": float("-inf"), "*": ["."]}})
    assert (marks_of(config.missing, "x"), marks_of(config.missing, "y")) == ((".", "-inf"), (".",))
