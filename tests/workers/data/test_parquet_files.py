"""Parquet: types as they are, lists, several row groups."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.sources.parquet_files import read_parquet
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every


def _read(folder: Path, columns: dict[str, Any], *, row_group_size: int = 2, **settings: Any) -> Batch:
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=row_group_size)
    base: dict[str, Any] = {
        "source": "parquet",
        "root": str(folder),
        "train": ["a.parquet"],
        "label": "y",
        "scale": "none",
    }
    data = open_data(DataConfig.model_validate(base | settings), seed=0)
    return data.train.gather(np.arange(len(data.train)))


@every(
    ("values", "expected"),
    [
        (pa.array([5, -7, None]), [5, -7, MISSING_ID]),
        (pa.array([2**64 - 1, 0, None], pa.uint64()), [-1, 0, MISSING_ID]),
        (pa.array([-(2**63), 2**63 - 1, 0]), [-(2**63), 2**63 - 1, 0]),
        (pa.array([3.0, float("nan"), None]), [3, MISSING_ID, MISSING_ID]),
        (pa.array([True, False, None]), [1, 0, MISSING_ID]),
        (pa.array([" a ", "?", None]), [hash_text(b"a"), MISSING_ID, MISSING_ID]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), [hash_text(b"a"), hash_text(b"b"), hash_text(b"a")]),
        (pa.array(["a", "b", None], pa.large_string()), [hash_text(b"a"), hash_text(b"b"), MISSING_ID]),
        (pa.array([b"\xff", b"b", None]), [hash_text(b"\xff"), hash_text(b"b"), MISSING_ID]),
        (pa.array([datetime.date(1970, 1, 2), None, datetime.date(1970, 1, 1)]), [86_400_000_000, MISSING_ID, 0]),
        (pa.nulls(3), [MISSING_ID] * 3),
    ],
    ids=["int", "uint64", "extremes", "float", "bool", "text", "dictionary", "large", "bytes", "date", "null"],
)
def test_categories_of_every_type_become_ids(tmp_path: Path, values: pa.Array, expected: list[int]) -> None:
    batch = _read(tmp_path, {"c": values, "y": [0, 1, 1]}, sparse=["c"])
    assert batch.ids["c"].values_N.tolist() == expected


@every(
    ("values", "expected"),
    [
        (pa.array([1, 2, None], pa.int8()), [1.0, 2.0, 9.0]),
        (pa.array([1.5, float("nan"), None]), [1.5, 9.0, 9.0]),
        (pa.array([True, False, None]), [1.0, 0.0, 9.0]),
        (pa.array([Decimal("1.25"), None, Decimal("2")]), [1.25, 9.0, 2.0]),
        (pa.array(["1.5", " 2 ", "NA"]), [1.5, 2.0, 9.0]),
        (pa.array([datetime.date(1970, 1, 2), None, datetime.date(1970, 1, 1)]), [86_400.0, 9.0, 0.0]),
        (pa.nulls(3), [0.0] * 3),
    ],
    ids=["int", "float", "bool", "decimal", "text", "date", "null"],
)
def test_dense_columns_of_every_type_become_numbers(tmp_path: Path, values: pa.Array, expected: list[float]) -> None:
    batch = _read(tmp_path, {"x": values, "y": [0, 1, 1]}, dense=[{"column": "x", "fill": 9.0}])
    assert batch.dense_BI[:, 0].tolist() == expected


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())], ids=["list", "large list"])
def test_list_columns_are_multi_valued(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([[3, 1, 3], None, [], [None, 7]], kind)
    ragged = _read(tmp_path, {"c": values, "y": [0, 1, 1, 0]}, sparse=["c"]).ids["c"]
    assert ragged.values_N.tolist() == [3, 1, 3, 7]
    assert ragged.lengths_B is not None and ragged.lengths_B.tolist() == [3, 0, 0, 1]
    assert ragged.weights_N is None


def test_weights_follow_their_ids_when_missing_ids_are_dropped(tmp_path: Path) -> None:
    columns = {"c": [["a", None], ["b"]], "w": [[0.5, 9.0], [0.25]], "y": [True, False]}
    column = {"column": "c", "pooling": "weighted", "weights": "w"}
    ragged = _read(tmp_path, columns, sparse=[column]).ids["c"]
    assert ragged.values_N.tolist() == [hash_text(b"a"), hash_text(b"b")]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("positive", [["4.0", "5"], [4, 5.0]], ids=["texts", "numbers"])
def test_positive_numbers_are_compared_as_numbers(tmp_path: Path, positive: list[Any]) -> None:
    label = {"column": "y", "positive": positive}
    batch = _read(tmp_path, {"x": [1, 2, 3], "y": [3.5, 4.0, 5.0]}, dense=["x"], label=label)
    assert batch.label_BT[:, 0].tolist() == [0.0, 1.0, 1.0]


def test_numbers_among_the_missing_values_are_missing(tmp_path: Path) -> None:
    columns = {"x": [-1.0, 3.0], "c": [-1, 5], "y": [0, 1]}
    batch = _read(tmp_path, columns, dense=[{"column": "x", "fill": 9.0}], sparse=["c"], missing=["?", -1])
    assert batch.dense_BI[:, 0].tolist() == [9.0, 3.0]
    assert batch.ids["c"].values_N.tolist() == [MISSING_ID, 5]


def test_of_a_folder_only_parquet_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\n")
    assert len(_read(tmp_path, {"x": [1, 2], "y": [0, 1]}, dense=["*"], train=".")) == 2
    (tmp_path / "a.parquet").unlink()
    config = DataConfig.model_validate(
        {"source": "parquet", "root": str(tmp_path), "train": ".", "label": "y", "dense": ["x"]}
    )
    with pytest.raises(DataError, match=r"has no parquet files, only job\.yaml"):
        open_data(config, seed=0)


def test_positive_texts_are_compared_with_whole_numbers_too(tmp_path: Path) -> None:
    label = {"column": "y", "positive": ["3"]}
    assert _read(tmp_path, {"x": [1, 2], "y": [3, 4]}, dense=["x"], label=label).label_BT[:, 0].tolist() == [1.0, 0.0]


@every(
    ("columns", "settings", "expected"),
    [
        ({"x": [1, 2], "y": [0, 1]}, {"dense": ["z"]}, "has no column z; it has: x, y"),
        ({"c": [1.0, 1.5], "y": [0, 1]}, {"sparse": ["c"]}, "row 2, column c: 1.5 is not a whole number"),
        ({"x": [[1], [2]], "y": [0, 1]}, {"dense": ["x"]}, "column x: holds list.*allowed: numbers"),
        ({"c": [{"a": 1}, {"a": 2}], "y": [0, 1]}, {"sparse": ["c"]}, "column c: is a struct with the fields a"),
        ({"c": [1, 2], "y": [0, 1]}, {"sparse": [{"column": "c", "separator": ";"}]}, "holds int64; allowed: texts"),
        ({"x": [1.0, 2.0, float("inf")], "y": [0, 1, 1]}, {"dense": ["x"]}, "row 3, column x: is infinite"),
        ({"x": [1, 2], "y": [0.0, 0.5]}, {"dense": ["x"]}, "row 2, column y: the label is 0.5"),
        ({"x": [1, 2], "y": pa.array([0, None])}, {"dense": ["x"]}, "row 2, column y: the label is missing"),
    ],
    ids=["no column", "fraction", "list as dense", "struct", "separator", "inf", "label", "no label"],
)
def test_bad_columns_are_named(
    tmp_path: Path, columns: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        _read(tmp_path, columns, **settings)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "a.parquet: is empty"), (b"x,y\n1,2\n" * 9, "cannot be read as parquet")],
    ids=["empty", "a csv"],
)
def test_files_that_are_no_parquet_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    config = DataConfig.model_validate(
        {"source": "parquet", "root": str(tmp_path), "train": ["a.parquet"], "label": "y", "dense": ["x"]}
    )
    with pytest.raises(DataError, match=expected):
        open_data(config, seed=0)


DIGITS = [Decimal("123456789012345678"), Decimal("123456789012345679"), Decimal(-5), None]


@pytest.mark.parametrize("kind", [pa.decimal128(20, 0), pa.decimal128(30, 4), pa.decimal256(40, 0)], ids=str)
def test_decimals_as_ids_keep_all_their_digits(tmp_path: Path, kind: Any) -> None:
    batch = _read(tmp_path, {"c": pa.array(DIGITS, kind), "y": [0, 1, 0, 1]}, sparse=["c"])
    assert batch.ids["c"].values_N.tolist() == [123456789012345678, 123456789012345679, -5, MISSING_ID]


@every(
    ("values", "why"),
    [
        (pa.array([Decimal("1"), Decimal("1.5")]), "1.5 is not a whole number; a category is"),
        (pa.array([1, 2**63], pa.decimal128(20, 0)), "9223372036854775808 is beyond 64 bits; store the column as text"),
        (pa.array([1.0, 2.0**53 + 2]), "9007199254740994 has lost digits as double; store the column as int64 or text"),
        (pa.array([1.0, 2.0**24 + 2], pa.float32()), "16777218 has lost digits as float; store the column as int64"),
        (pa.array([1.0, float("inf")]), "inf is not a whole number"),
    ],
    ids=["fraction", "20 digits", "double", "float", "infinite"],
)
def test_numbers_that_cannot_be_an_id_digit_by_digit_are_refused(tmp_path: Path, values: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"row 2, column c: {why}"):
        _read(tmp_path, {"c": values, "y": [0, 1]}, sparse=["c"])


@every("empty", [[None, None], [float("nan"), float("nan")]], ids=["null", "NaN"])
@every("order", [["a", "b"], ["b", "a"]])
def test_a_column_of_texts_may_be_empty_and_of_numbers_in_another_file(
    tmp_path: Path, order: list[str], empty: list[float | None]
) -> None:
    pq.write_table(pa.table({"s": ["x", "y"], "y": [0, 1]}), tmp_path / "a.parquet")
    values = pa.array(empty, pa.float64(), from_pandas=False)
    pq.write_table(pa.table({"s": values, "y": [0, 1]}), tmp_path / "b.parquet")
    files = [f"{name}.parquet" for name in order]
    config = {"source": "parquet", "root": str(tmp_path), "train": files, "label": "y", "sparse": ["s"]}
    assert len(open_data(DataConfig.model_validate(config), seed=0).train) == 4


def test_reading_holds_one_row_group_and_not_the_file(tmp_path: Path) -> None:
    rows, groups = 1_000_000, 20
    columns = {name: np.random.default_rng(1).integers(0, 2**62, rows) for name in ("a", "b", "c")}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=rows // groups)
    del columns
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_parquet(path, ["a", "b", "c"], lambda _share: None):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 6 * path.stat().st_size / groups
