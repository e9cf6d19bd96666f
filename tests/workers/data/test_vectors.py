"""Vectors: a dense column of lists of one width, in every form of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.strange_files import read, refusal

ROWS = [[1.5, -2.0, 3.25], [4.0, 5.0, None], None, [0.0, 1e-3, 7.0]]
READ = [[1.5, -2.0, 3.25], [4.0, 5.0, 9.0], [9.0, 9.0, 9.0], [0.0, np.float32(1e-3), 7.0]]
V: dict[str, Any] = {"dense": [{"column": "v", "width": 3, "fill": 9.0}]}


def _parquet(values: Any, **more: Any) -> dict[str, bytes]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"v": values, "y": [0, 1] * (len(values) // 2)} | more), sink)
    return {"a.parquet": bytes(sink.getvalue())}


def _csv(texts: list[str], **more: Any) -> dict[str, bytes]:
    sink = pa.BufferOutputStream()
    pacsv.write_csv(pa.table({"v": texts, "y": [0, 1] * (len(texts) // 2)} | more), sink)
    return {"a.csv": bytes(sink.getvalue())}


def _texts(write: Callable[[list[str]], str]) -> list[str]:
    return ["" if row is None else write(["" if x is None else str(x) for x in row]) for row in ROWS]


@every(
    "kind",
    [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 3), pa.list_(pa.decimal128(9, 4))],
    ids=["list", "large list", "fixed size", "decimals"],
)
def test_lists_of_every_type_become_numbers(tmp_path: Path, kind: pa.DataType) -> None:
    assert read(tmp_path, _parquet(pa.array(ROWS, pa.list_(pa.float64())).cast(kind)), **V).dense == READ


def test_an_empty_list_is_a_missing_one(tmp_path: Path) -> None:
    assert read(tmp_path, _parquet(pa.array([*ROWS[:2], [], ROWS[3]])), **V).dense == READ
    assert read(tmp_path, _csv(["[1, 2, 3]", "[]"]), **V).dense == [[1, 2, 3], [9, 9, 9]]
    assert read(tmp_path, _parquet(pa.nulls(2)), **V).dense == [[0, 0, 0]] * 2  # constant: it counts as 0


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
    ids=["json", "gap", "database", "numpy", "semicolons", "bars", "spaces"],
)
def test_texts_of_lists_are_read_in_every_writing(tmp_path: Path, texts: list[str]) -> None:
    assert read(tmp_path, _csv(texts), **V).dense == READ
    assert read(tmp_path, _parquet(pa.array(texts)), **V).dense == READ


def test_a_decimal_comma_is_no_separator(tmp_path: Path) -> None:
    files = {"a.csv": b"v\ty\n1,5; 2; 3\t0\n4 5,25 6\t1\n"}
    assert read(tmp_path, files, delimiter="\t", decimal=",", **V).dense == [[1.5, 2, 3], [4, 5.25, 6]]


@every(
    ("values", "why"),
    [
        (pa.array([[1.0, 2, 3], [1.0, 2]]), "row 2, column v: has 2 numbers; allowed: 3, the column's width"),
        (pa.array([[1.0, 2, 3, 4], None]), "row 1, column v: has 4 numbers; allowed: 3, the column's width"),
        (pa.array(["[1, 2, 3]", "[1,,2,3]"]), "row 2, column v: has 4 numbers; allowed: 3"),
        (pa.array(["1,2,3", "1,2,3,"]), "row 2, column v: has 4 numbers; allowed: 3"),
        (pa.array(["[1, 2, 3]", "[1, x, 3]"]), "row 2, column v: 'x' is not a number"),
        (pa.array([[1.0, 2, 3], [1.0, float("inf"), 3]]), "row 2, column v: is infinite"),
        (pa.array([[1.0, 2, 3], [1.0, 1e300, 3]]), "row 2, column v: is beyond float32"),
        (pa.array([1.0, 2.0]), "column v: holds double; allowed: lists of 3 numbers, or texts of such lists"),
        (pa.array([[[1.0]], [[2.0]]]), "column v: .*has 1 numbers|holds .*; allowed: numbers"),
        (pa.array([["a", "b", "c"], None]), "row 1, column v: 'a' is not a number"),
        (pa.array([[{"a": 1}], None]), "column v: is a list of structs|has 1 numbers"),
    ],
)
def test_what_is_no_vector_of_the_width_is_named_with_its_row(tmp_path: Path, values: Any, why: str) -> None:
    assert re.search(why, refusal(tmp_path, _parquet(values), **V))


def test_a_list_without_a_width_is_refused_by_a_line_that_names_it(tmp_path: Path) -> None:
    for files in (_parquet(pa.array(ROWS)), _csv(["[1, 2, 3]", "[4, 5, 6]"])):
        for dense in ("v", "*"):
            assert "{column: NAME, width: N}" in refusal(tmp_path, files, dense=[dense])


def _open(folder: Path, **settings: Any) -> Data:
    base = {"root": str(folder), "source": "parquet", "train": "a.parquet", "label": "y"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _inputs(data: Data) -> list[list[float]]:
    return data.train.gather(np.arange(len(data.train))).dense_BI.tolist()


def test_a_vector_equals_its_numbers_in_columns_of_their_own(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    matrix_NW = random.lognormal(3, 2, (500, 4))
    matrix_NW[random.random((500, 4)) < 0.1] = np.nan
    rows = [[None if x != x else x for x in row] for row in matrix_NW.tolist()]
    flat = {f"f{w}": [row[w] for row in rows] for w in range(4)}
    ids = {"u": random.integers(0, 9, 500)}
    pq.write_table(pa.table({"v": rows, "y": [0, 1] * 250, "x": matrix_NW[:, 0]} | flat | ids), tmp_path / "a.parquet")
    for more in ({}, {"scale": "log"}, {"scale": "log_standard", "fill": 3.0}):
        own = _open(tmp_path, dense=["x", {"column": "v", "width": 4} | more], sparse=["u"])
        one = _open(tmp_path, dense=["x", {"column": "f*"} | more], sparse=["u"])
        assert own.train.schema.dense == ("x", "v[0]", "v[1]", "v[2]", "v[3]") and _inputs(own) == _inputs(one)


def test_a_pattern_gives_each_of_its_columns_the_width(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(_parquet(pa.array([[1.0], [2.0]]), w=pa.array([[3.0], [4.0]]))["a.parquet"])
    data = _open(tmp_path, dense=[{"column": "*", "width": 1, "scale": "none"}])
    assert data.train.schema.dense == ("v[0]", "w[0]") and _inputs(data) == [[1, 3], [2, 4]]


def test_inputs_have_the_column_of_vectors_once_and_all_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(_parquet(pa.array([[1, 2, 3], [4, 5, 6]]))["a.parquet"])
    record = json.loads(json.dumps(_open(tmp_path, **V, sparse=["v"]).inputs))
    assert Inputs.of_json(record).columns() == ["v"]
    for width in (4, 100_000):
        wide = [record["dense"][0] | {"width": width, "column": f"v{c}"} for c in range(2000)]
        with pytest.raises(ValueError, match=f"origins has 3 numbers for {2000 * width} dense columns"):
            Inputs.of_json(record | {"dense": wide})
    with pytest.raises(ConfigError, match=r"data.dense: names column v\[1\] twice"):
        _open(tmp_path, dense=["v[1]", {"column": "v", "width": 2}])
