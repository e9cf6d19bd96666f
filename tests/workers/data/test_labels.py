"""Missing labels: an error that counts them, or rows left out; never class 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

YES = {"column": "y", "positive": ["yes"]}


def _open(folder: Path, labels: list[str], **settings: Any) -> Data:
    lines = [f"{i},{label}" for i, label in enumerate(labels)]
    (folder / "a.csv").write_text("\n".join(["x,y", *lines]))
    base: dict[str, Any] = {"source": "csv", "root": str(folder), "train": "a.csv", "dense": ["x"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _rows(data: Data) -> list[tuple[float, float]]:
    batch = data.train.gather(np.arange(len(data.train)))
    return list(zip(batch.dense_BI[:, 0].tolist(), batch.label_BT[:, 0].tolist(), strict=True))


@every("text", ["?", "", " NA ", "null", "nan", "-9"])
@every("label", [YES, {"column": "y"}], ids=["texts", "numbers"])
def test_a_missing_label_is_an_error_that_counts_them(tmp_path: Path, text: str, label: dict[str, Any]) -> None:
    one, zero = ("yes", "no") if label is YES else ("1", "0")
    labels = [one, zero, text, one, text, zero]
    missing = ["", "?", "NA", "null", "nan", "-9"]
    where = (
        r"a.csv, row 3, column y: the label is missing \(2 of 6 rows\); data.label.missing: skip leaves such rows out"
    )
    with pytest.raises(DataError, match=where):
        _open(tmp_path, labels, label=label, missing=missing)
    data = _open(tmp_path, labels, label=label | {"missing": "skip"}, missing=missing)
    assert _rows(data) == [(0.0, 1.0), (1.0, 0.0), (3.0, 1.0), (5.0, 0.0)]
    assert "2 rows left out, their label is missing" in data.describe()


def test_a_text_that_means_one_is_not_missing(tmp_path: Path) -> None:
    data = _open(tmp_path, ["NA", "some", "NA"], label={"column": "y", "positive": ["NA"]})
    assert [label for _, label in _rows(data)] == [1.0, 0.0, 1.0]


def test_left_out_rows_do_not_enter_the_statistics_nor_move_the_split(tmp_path: Path) -> None:
    whole = ["1", "0"] * 50
    holes = [text if i % 10 else "?" for i, text in enumerate(whole)]
    label = {"column": "y", "missing": "skip"}
    data = _open(tmp_path, holes, label=label, eval_fraction=0.3)
    full = _open(tmp_path, whole, label=label, eval_fraction=0.3)
    assert data.eval is not None and full.eval is not None
    assert set(_rows(data)) < set(_rows(full)) and len(data.train) + len(data.eval) == 90
    scaled = _open(tmp_path, ["0", "?", "1"], label=label, scale="standard")
    assert [x for x, _ in _rows(scaled)] == [-1.0, 1.0]


def test_labels_that_are_all_missing_are_an_error_with_skip_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the label is missing \(3 of 3 rows\)$"):
        _open(tmp_path, ["?"] * 3, label={"column": "y", "missing": "skip"})


@every(
    "values",
    [
        pa.array([1, None, 0, None]),
        pa.array([1.0, float("nan"), 0.0, None]),
        pa.array([True, None, False, None]),
        pa.array(["1", None, "0", "?"]),
        pa.array(["1", "?", "0", None]).dictionary_encode(),
    ],
    ids=["int", "float", "bool", "text", "dictionary"],
)
@every("positive", [None, ["1"], {"above": 0.5}], ids=["as it is", "listed", "above"])
def test_nulls_of_any_type_are_missing(tmp_path: Path, values: Any, positive: Any) -> None:
    pq.write_table(pa.table({"x": [0, 1, 2, 3], "y": values}), tmp_path / "a.parquet")
    config = {"source": "parquet", "root": str(tmp_path), "train": "a.parquet", "dense": ["x"], "scale": "none"}
    label: dict[str, Any] = {"column": "y", "positive": positive}
    with pytest.raises(DataError, match=r"row 2, column y: the label is missing \(2 of 4 rows\)"):
        open_data(DataConfig.model_validate(config | {"label": label}), seed=0)
    data = open_data(DataConfig.model_validate(config | {"label": label | {"missing": "skip"}}), seed=0)
    assert _rows(data) == [(0.0, 1.0), (2.0, 0.0)]


def test_rows_of_a_source_of_ones_own_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "own_labels.py").write_text(
        "TRAIN = {'label': [0, None, 1], 'dense': {'x': [1.0, 2.0, 3.0]}}\n"
        "def samples(split):\n    return TRAIN if split == 'train' else None\n"
    )
    config = {"source": "own_labels:samples", "root": str(tmp_path), "scale": "none"}
    data = open_data(DataConfig.model_validate(config | {"label": {"column": "label", "missing": "skip"}}), seed=0)
    assert _rows(data) == [(1.0, 0.0), (3.0, 1.0)]
    assert "1 rows left out, their label is missing" in data.describe()


NUMBERS = ["3.5", "-2", "0", "1e3", "0.1", "1"]


@every("form", ["csv", "parquet"])
def test_labels_that_are_numbers_keep_their_float32_values(tmp_path: Path, form: str) -> None:
    label = {"column": "y", "kind": "number"}
    if form == "csv":
        data = _open(tmp_path, NUMBERS, label=label)
    else:
        columns = {"x": np.arange(6.0), "y": np.array([float(text) for text in NUMBERS])}
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        data = _open(tmp_path, [], label=label, source="parquet", train="a.parquet")
    assert [value for _, value in _rows(data)] == [float(np.float32(text)) for text in NUMBERS]
    again = _open(tmp_path, NUMBERS, label=label) if form == "csv" else data  # from the cache
    assert _rows(again) == _rows(data)


def test_the_same_file_may_have_labels_of_both_kinds(tmp_path: Path) -> None:
    classes = _open(tmp_path, ["0", "1", "1"], label={"column": "y"})
    numbers = _open(tmp_path, ["0", "1", "1"], label={"column": "y", "kind": "number"})
    assert _rows(classes) == _rows(numbers)
    assert len(list((tmp_path / ".shardkeep-cache").glob("*/meta.json"))) == 2


@every(
    ("text", "what"),
    [
        ("many", "'many' is not a number"),
        ("1e39", "the label is beyond float32"),
        ("inf", "is infinite; allowed: finite numbers"),
        ("?", "the label is missing"),
    ],
    ids=["text", "too large", "infinite", "missing"],
)
def test_a_label_that_is_no_number_is_named_with_its_row(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(DataError, match=f"a.csv, row 2, column y: {what}"):
        _open(tmp_path, ["1.5", text, "2"], label={"column": "y", "kind": "number"})


def test_a_number_where_a_class_is_expected_names_the_loss_for_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the label is 3.5; allowed: 0 and 1, .* or train.loss: mse for numbers"):
        _open(tmp_path, ["0", "3.5"], label={"column": "y"})
    with pytest.raises(ValueError, match="positive: has no effect with kind: number"):
        DataConfig.model_validate({"source": "csv", "train": "a.csv", "label": YES | {"kind": "number"}})


def _weighted(folder: Path, weights: list[str], form: str, **settings: Any) -> Data:
    rows = [f"{i},{i % 2},{weight}" for i, weight in enumerate(weights)]
    (folder / "a.csv").write_text("\n".join(["x,y,w", *rows]))
    if form == "parquet":
        columns = {"x": np.arange(float(len(weights))), "y": np.arange(len(weights)) % 2}
        numbers = [None if weight == "" else float(weight) for weight in weights]
        pq.write_table(pa.table(columns | {"w": numbers}), folder / "a.parquet")
    base: dict[str, Any] = {"root": str(folder), "train": f"a.{form}", "label": "y", "dense": ["*"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | {"weight": "w"} | settings), seed=0)


@every("form", ["csv", "parquet"])
def test_weights_of_samples_are_gathered_and_no_pattern_takes_their_column(tmp_path: Path, form: str) -> None:
    weights = ["0.5", "2", "0", "1e3"]
    for _ in range(2):  # converted, then from the cache
        data = _weighted(tmp_path, weights, form)
        batch = data.train.gather(np.array([3, 0, 2]))
        assert data.train.schema.dense == ("x",)
        assert batch.weight_B is not None and batch.weight_B.tolist() == [1000.0, 0.5, 0.0]
        part = batch.slice(1, 3)
        assert part.weight_B is not None and part.weight_B.tolist() == [0.5, 0.0]
    plain = _weighted(tmp_path, weights, form, weight=None, dense=["x"])
    assert plain.train.gather(np.array([0])).weight_B is None
    assert plain.fingerprint != data.fingerprint


@every("form", ["csv", "parquet"])
@every(("text", "what"), [("-0.5", "is -0.5"), ("", "is missing")], ids=["negative", "missing"])
def test_a_weight_that_is_none_is_named_with_its_row(tmp_path: Path, form: str, text: str, what: str) -> None:
    with pytest.raises(DataError, match=f"a.{form}, row 3, column w: the weight {what}; allowed: numbers from 0 on"):
        _weighted(tmp_path, ["1", "1", text, "1"], form)


def test_the_label_is_no_weight_and_a_stream_has_none() -> None:
    config = {"source": "csv", "train": "a.csv", "label": "y", "dense": ["x"], "weight": "y"}
    with pytest.raises(ConfigError, match=r"data.weight: names y, which is the label"):
        open_data(DataConfig.model_validate(config), seed=0)
    with pytest.raises(ConfigError, match=r"data.weight: has no effect with source: synthetic"):
        open_data(DataConfig.model_validate({"source": "synthetic", "weight": "w"}), seed=0)
