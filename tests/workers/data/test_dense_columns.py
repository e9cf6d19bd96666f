"""Dense columns: their scaling, over training rows alone, and vectors: lists of one width, in every form of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.samples import Data
from tests.support.cases import every
from tests.support.data_files import batch_of, first_column, opened, read, refusal, write_file

ROWS = [[1.5, -2.0, 3.25], [4.0, 5.0, None], None, [0.0, 1e-3, 7.0]]
READ = [[1.5, -2.0, 3.25], [4.0, 5.0, 9.0], [9.0, 9.0, 9.0], [0.0, np.float32(1e-3), 7.0]]
V: dict[str, Any] = {"dense": [{"column": "v", "width": 3, "fill": 9.0}]}


def _file(values: Any, form: str = "parquet") -> dict[str, Any]:
    return {f"a.{form}": {"v": values, "y": [0, 1] * (len(values) // 2)}}


def _texts(write: Callable[[list[str]], str]) -> list[str]:
    return ["" if row is None else write(["" if x is None else str(x) for x in row]) for row in ROWS]


@every(
    "kind",
    [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 3), pa.list_(pa.decimal128(9, 4))],
)
def test_lists_of_every_type_become_numbers(tmp_path: Path, kind: pa.DataType) -> None:
    assert read(tmp_path, _file(pa.array(ROWS, pa.list_(pa.float64())).cast(kind)), **V).dense == READ


def test_an_empty_list_is_a_missing_one(tmp_path: Path) -> None:
    assert read(tmp_path, _file(pa.array([*ROWS[:2], [], ROWS[3]])), **V).dense == READ
    assert read(tmp_path, _file(["[1, 2, 3]", "[]"], "csv"), **V).dense == [[1, 2, 3], [9, 9, 9]]
    assert read(tmp_path, _file(pa.nulls(2)), **V).dense == [[0, 0, 0]] * 2  # constant: it counts as 0


@every(
    "texts",
    [
        _texts(lambda row: json.dumps([float(x) if x else None for x in row])),
        _texts(lambda row: "[" + ",".join(row) + "]"),
        _texts(lambda row: "{" + ", ".join(x or "NA" for x in row) + "}"),
        _texts(lambda row: "[ " + "\n  ".join(x or "nan" for x in row) + " ]"),
        _texts(lambda row: ";".join(row)),
        _texts(lambda row: "|".join(row)),
        _texts(lambda row: " ".join(x or "nan" for x in row)),
    ],
)
def test_texts_of_lists_are_read_in_every_writing(tmp_path: Path, texts: list[str]) -> None:
    for form in ("csv", "parquet"):
        assert read(tmp_path, _file(texts, form), **V).dense == READ


def test_a_decimal_comma_is_no_separator(tmp_path: Path) -> None:
    files = {"a.csv": "v\ty\n1,5; 2; 3\t0\n4 5,25 6\t1\n"}
    assert read(tmp_path, files, delimiter="\t", decimal=",", **V).dense == [[1.5, 2, 3], [4, 5.25, 6]]


WITHOUT_WIDTH = r"\{column: NAME, width: N\}"


@every(
    ("values", "dense", "why"),
    [
        ([[1.0, 2, 3], [1.0, 2]], None, "row 2, column v: has 2 numbers; allowed: 3, the column's width"),
        ([[1.0, 2, 3, 4], None], None, "row 1, column v: has 4 numbers; allowed: 3, the column's width"),
        (["[1, 2, 3]", "[1,,2,3]"], None, "row 2, column v: has 4 numbers; allowed: 3"),
        (["1,2,3", "1,2,3,"], None, "row 2, column v: has 4 numbers; allowed: 3"),
        (["[1, 2, 3]", "[1, x, 3]"], None, "row 2, column v: 'x' is not a number"),
        ([[1.0, 2, 3], [1.0, float("inf"), 3]], None, "row 2, column v: is infinite"),
        ([[1.0, 2, 3], [1.0, 1e300, 3]], None, "row 2, column v: is beyond float32"),
        ([1.0, 2.0], None, "column v: holds double; allowed: lists of 3 numbers, or texts of such lists"),
        ([[[1.0]], [[2.0]]], None, "column v: .*has 1 numbers|holds .*; allowed: numbers"),
        ([["a", "b", "c"], None], None, "row 1, column v: 'a' is not a number"),
        ([[{"a": 1}], None], None, "column v: is a list of structs|has 1 numbers"),
        (ROWS, ["v"], WITHOUT_WIDTH),
        (["[1, 2, 3]", "[4, 5, 6]"], ["*"], WITHOUT_WIDTH),
    ],
)
def test_what_is_no_vector_of_the_width_is_named(tmp_path: Path, values: Any, dense: Any, why: str) -> None:
    line = refusal(tmp_path, _file(pa.array(values)), **V | ({"dense": dense} if dense else {}))
    assert re.search(why, line), line


def test_a_vector_equals_its_numbers_in_columns_of_their_own(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    matrix_NW = random.lognormal(3, 2, (500, 4))
    matrix_NW[random.random((500, 4)) < 0.1] = np.nan
    rows = [[None if x != x else x for x in row] for row in matrix_NW.tolist()]
    flat = {f"f{w}": [row[w] for row in rows] for w in range(4)}
    columns = {"v": rows, "y": [0, 1] * 250, "x": matrix_NW[:, 0], **flat}
    write_file(tmp_path / "a.parquet", columns)
    for more in ({}, {"scale": "log"}, {"scale": "log_standard", "fill": 3.0}):
        own, one = (
            opened(tmp_path, train="a.parquet", dense=["x", column | more], scale=None).train
            for column in ({"column": "v", "width": 4}, {"column": "f*"})
        )
        assert own.schema.dense == ("x", "v[0]", "v[1]", "v[2]", "v[3]")
        assert np.array_equal(batch_of(own).dense_BI, batch_of(one).dense_BI)


def test_a_pattern_gives_each_of_its_columns_the_width_and_inputs_have_a_column_once(tmp_path: Path) -> None:
    files = {"a.parquet": {"v": [[1.0], [2.0]], "w": [[3.0], [4.0]], "y": [0, 1]}}
    data = opened(tmp_path, files, dense=[{"column": "*", "width": 1}])
    assert data.train.schema.dense == ("v[0]", "w[0]") and batch_of(data.train).dense_BI.tolist() == [[1, 3], [2, 4]]
    record = json.loads(json.dumps(opened(tmp_path, _file([[1, 2, 3], [4, 5, 6]]), **V, sparse=["v"]).inputs))
    assert Inputs.of_json(record).columns() == ["v"]
    wide = [record["dense"][0] | {"width": 100, "column": f"v{c}"} for c in range(200)]
    with pytest.raises(ValueError, match=r"scales: 'v.*' is no dense column, or has no scale"):
        Inputs.of_json(record | {"dense": wide})
    line = refusal(tmp_path, _file([[1, 2, 3], [4, 5, 6]]), dense=["v[1]", {"column": "v", "width": 2}])
    assert re.search(r"data.dense: names column v\[1\] twice", line)


# Scaling

VALUES = np.array([-3.0, 0.0, 1.0, 2.0, 50.0])


def _open(folder: Path, values: list[float | None], held: list[float] | None = None, **settings: Any) -> Data:
    files = {}
    for name, column in (("a.csv", values), ("b.csv", held or [])):
        lines = "".join(f"{'' if x is None else repr(float(x))},{i % 2}\n" for i, x in enumerate(column))
        files[name] = "x,y\n" + lines
    more: dict[str, Any] = {"dense": ["x"], "scale": None} | ({"eval": ["b.csv"]} if held else {})
    return opened(folder, files, **more | settings)


def _log(x: Any) -> Any:
    return np.sign(x) * np.log1p(np.abs(x))


def _standard(x: Any, over: Any) -> Any:
    return (x - over.mean()) / over.std()


def test_evaluation_data_are_scaled_by_the_statistics_of_the_training_rows(tmp_path: Path) -> None:
    held = np.array([1000.0, 2000.0])
    data = _open(tmp_path, VALUES.tolist(), held.tolist())
    assert first_column(data.eval) == pytest.approx(_standard(held, VALUES), rel=1e-5)
    values = np.random.default_rng(0).normal(5, 3, 4000)
    data = _open(tmp_path, values.tolist(), split={"by": "random", "eval": 0.5, "test": 0.0})
    train, some = np.array(first_column(data.train)), np.array(first_column(data.eval))
    assert abs(train.mean()) < 1e-5 and abs(train.std() - 1) < 1e-5 and abs(some.mean()) > 1e-4


@every(("fill", "raw"), [("mean", 4.0), (7.0, 7.0)])
@every("scale", ["none", "log", "standard", "log_standard"])
def test_missing_values_are_filled_before_scaling(tmp_path: Path, fill: Any, raw: float, scale: str) -> None:
    data = _open(tmp_path, [2.0, None, 6.0], dense=[{"column": "x", "fill": fill, "scale": scale}])
    present = np.array([2.0, 6.0])
    expected: float = raw
    if scale.startswith("log"):
        expected, present = _log(raw), _log(present)
    if scale.endswith("standard"):
        expected = _standard(expected, present)
    assert first_column(data.train)[1] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_constant_and_huge_columns_keep_what_they_can_and_statistics_span_chunks(tmp_path: Path) -> None:
    assert first_column(_open(tmp_path, [7.0] * 4).train) == [0.0] * 4
    stamps = 1.7e9 + np.arange(100.0)
    found = first_column(_open(tmp_path, stamps.tolist()).train)
    assert found == pytest.approx(_standard(stamps, stamps), rel=1e-4, abs=1e-5)
    found = first_column(_open(tmp_path, [1e200, 1.0], scale="log").train)
    assert found == pytest.approx(np.log1p([1e200, 1.0]), rel=1e-6), "beyond float32"
    values = np.concatenate([np.full(66_000, -1.0), np.linspace(0, 1000, 20_000)])
    found = first_column(_open(tmp_path, values.tolist()).train)
    assert [found[0], found[-1]] == pytest.approx(_standard(values, values)[[0, -1]], rel=1e-4)


def test_the_hash_of_texts_never_changes() -> None:
    assert hash_text(b"") == MISSING_ID == 0x2D06800538D394C2
    assert hash_text(b"y") == 2822446240451570149
