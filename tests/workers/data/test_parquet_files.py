"""Parquet: what a config makes of typed columns, and files that are read together. Types: test_strange_parquet.py."""

from __future__ import annotations

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


def _opened(folder: Path, **settings: Any) -> Batch:
    base: dict[str, Any] = {"source": "parquet", "root": str(folder), "train": "a.parquet", "label": "y"}
    data = open_data(DataConfig.model_validate(base | {"scale": "none"} | settings), seed=0)
    return data.train.gather(np.arange(len(data.train)))


def _read(folder: Path, columns: dict[str, Any], **settings: Any) -> Batch:
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2)
    return _opened(folder, **settings)


def test_weights_follow_their_ids_when_missing_ids_are_dropped(tmp_path: Path) -> None:
    columns = {"c": [["a", None], ["b"]], "w": [[0.5, 9.0], [0.25]], "y": [True, False]}
    column = {"column": "c", "pooling": "weighted", "weights": "w"}
    ragged = _read(tmp_path, columns, sparse=[column]).ids["c"]
    assert ragged.values_N.tolist() == [hash_text(b"a"), hash_text(b"b")]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [0.5, 0.25]


@every(
    ("labels", "positive", "expected"),
    [([3.5, 4.0, 5.0], ["4.0", "5"], [0, 1, 1]), ([3.5, 4.0, 5.0], [4, 5.0], [0, 1, 1]), ([3, 4, 9], ["3"], [1, 0, 0])],
    ids=["texts", "numbers", "whole numbers"],
)
def test_positive_numbers_are_compared_as_numbers(
    tmp_path: Path, labels: list[Any], positive: list[Any], expected: list[float]
) -> None:
    label = {"column": "y", "positive": positive}
    batch = _read(tmp_path, {"x": [1, 2, 3], "y": labels}, dense=["x"], label=label)
    assert batch.label_BT[:, 0].tolist() == expected


def test_numbers_among_the_missing_values_are_missing(tmp_path: Path) -> None:
    columns = {"x": [-1.0, 3.0], "c": [-1, 5], "y": [0, 1]}
    batch = _read(tmp_path, columns, dense=[{"column": "x", "fill": 9.0}], sparse=["c"], missing=["?", -1])
    assert batch.dense_BI[:, 0].tolist() == [9.0, 3.0]
    assert batch.ids["c"].values_N.tolist() == [MISSING_ID, 5]


def test_of_a_folder_only_parquet_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\n")
    assert len(_read(tmp_path, {"x": [1, 2], "y": [0, 1]}, dense=["*"], train=".")) == 2
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"has no parquet files, only job\.yaml"):
        _opened(tmp_path, train=".", dense=["x"])


@every("empty", [[None, None], [float("nan"), float("nan")]], ids=["null", "NaN"])
@every("order", [["a", "b"], ["b", "a"]])
def test_a_column_of_texts_may_be_empty_and_of_numbers_in_another_file(
    tmp_path: Path, order: list[str], empty: list[float | None]
) -> None:
    pq.write_table(pa.table({"s": ["x", "y"], "y": [0, 1]}), tmp_path / "a.parquet")
    values = pa.array(empty, pa.float64(), from_pandas=False)
    pq.write_table(pa.table({"s": values, "y": [0, 1]}), tmp_path / "b.parquet")
    assert len(_opened(tmp_path, train=[f"{name}.parquet" for name in order], sparse=["s"])) == 4


def test_reading_holds_one_row_group_and_not_the_file(tmp_path: Path) -> None:
    rows, groups = 400_000, 20
    columns = {name: np.random.default_rng(1).integers(0, 2**62, rows) for name in ("a", "b", "c")}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=rows // groups)
    del columns
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_parquet(path, ["a", "b", "c"], lambda _share: None):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 6 * path.stat().st_size / groups
