"""One label: missing ones are errors that are counted, or rows left out, never class 0. And weights of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.config import parse_config
from shardkeep.workers.data.samples import Data, doubtful_weights
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.local_job import LocalJob

YES = {"column": "y", "positive": ["yes"]}
NUMBER = {"column": "y", "kind": "number"}


def _config(folder: Path, **settings: Any) -> Data:
    base: dict[str, Any] = {"root": str(folder), "train": "a.csv", "dense": ["x"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _open(folder: Path, labels: list[str], **settings: Any) -> Data:
    (folder / "a.csv").write_text("\n".join(["x,y", *(f"{i},{label}" for i, label in enumerate(labels))]))
    return _config(folder, **settings)


def _rows(data: Data) -> list[tuple[float, float]]:
    batch = data.train.gather(np.arange(len(data.train)))
    return list(zip(batch.dense_BI[:, 0].tolist(), batch.label_BT[:, 0].tolist(), strict=True))


@every("text", ["?", "", " NA ", "null", "nan", "-9"])
@every("label", [YES, {"column": "y"}], ids=["texts", "numbers"])
def test_a_missing_label_is_an_error_that_counts_them(tmp_path: Path, text: str, label: dict[str, Any]) -> None:
    one, zero = ("yes", "no") if label is YES else ("1", "0")
    labels = [one, zero, text, one, text, zero]
    missing = ["", "?", "NA", "null", "nan", "-9"]
    where = r"a.csv, row 3, column y: the label is missing \(2 of 6 rows\); data.label.missing: skip leaves such rows"
    with pytest.raises(DataError, match=where):
        _open(tmp_path, labels, label=label, missing=missing)
    data = _open(tmp_path, labels, label=label | {"missing": "skip"}, missing=missing)
    assert _rows(data) == [(0.0, 1.0), (1.0, 0.0), (3.0, 1.0), (5.0, 0.0)]
    assert "2 rows left out, their label is missing" in data.describe()


def test_a_text_that_means_one_is_not_missing_and_labels_that_all_are_cannot_be_left_out(tmp_path: Path) -> None:
    data = _open(tmp_path, ["NA", "some", "NA"], label={"column": "y", "positive": ["NA"]})
    assert [label for _, label in _rows(data)] == [1.0, 0.0, 1.0]
    with pytest.raises(DataError, match=r"the label is missing \(3 of 3 rows\)$"):
        _open(tmp_path, ["?"] * 3, label={"column": "y", "missing": "skip"})


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
    label: dict[str, Any] = {"column": "y", "positive": positive}
    with pytest.raises(DataError, match=r"row 2, column y: the label is missing \(2 of 4 rows\)"):
        _config(tmp_path, train="a.parquet", label=label)
    data = _config(tmp_path, train="a.parquet", label=label | {"missing": "skip"})
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


def test_labels_that_are_numbers_keep_their_float32_values(tmp_path: Path) -> None:
    columns = {"x": np.arange(6.0), "y": np.array([float(text) for text in NUMBERS])}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for train in ("a.csv", "a.csv", "a.parquet"):  # converted, then from the cache
        data = _open(tmp_path, NUMBERS, label=NUMBER, train=train)
        assert [value for _, value in _rows(data)] == [float(np.float32(text)) for text in NUMBERS]


def test_the_same_file_may_have_labels_of_both_kinds(tmp_path: Path) -> None:
    classes, numbers = (_open(tmp_path, ["0", "1", "1"], label=label) for label in ({"column": "y"}, NUMBER))
    assert _rows(classes) == _rows(numbers)
    assert len(list((tmp_path / ".shardkeep-cache").glob("*/meta.json"))) == 2


@every(
    ("text", "label", "what"),
    [
        ("many", NUMBER, "'many' is not a number"),
        ("1e39", NUMBER, "the label is beyond float32"),
        ("inf", NUMBER, "is infinite; allowed: finite numbers"),
        ("?", NUMBER, "the label is missing"),
        ("3.5", {"column": "y"}, "the label is 3.5; allowed: 0 and 1, .* or train.loss: mse for numbers"),
    ],
)
def test_a_label_that_is_none_is_named_with_its_row(
    tmp_path: Path, text: str, label: dict[str, Any], what: str
) -> None:
    with pytest.raises(DataError, match=f"a.csv, row 2, column y: {what}"):
        _open(tmp_path, ["1", text, "0"], label=label)


# Weights of samples


def _weighted(folder: Path, weights: list[str], form: str, **settings: Any) -> Data:
    rows = [f"{i},{i % 2},{weight}" for i, weight in enumerate(weights)]
    (folder / "a.csv").write_text("\n".join(["x,y,w", *rows]))
    columns = {"x": np.arange(float(len(weights))), "y": np.arange(len(weights)) % 2}
    numbers = [None if weight == "" else float(weight) for weight in weights]
    pq.write_table(pa.table(columns | {"w": numbers}), folder / "a.parquet")
    return _config(folder, **{"train": f"a.{form}", "label": "y", "dense": ["*"], "weight": "w"} | settings)


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
    for settings, what in (
        (config, "names y, which is the label"),
        ({"source": "synthetic", "weight": "w"}, "has no effect with source: synthetic"),
    ):
        with pytest.raises(ConfigError, match=f"data.weight: {what}"):
            open_data(DataConfig.model_validate(settings), seed=0)
    with pytest.raises(ValueError, match="positive: has no effect with kind: number"):
        DataConfig.model_validate({"source": "csv", "train": "a.csv", "label": YES | {"kind": "number"}})


# Weights of entries


def _entries(folder: Path, weights: str) -> Data:
    """200 samples; of three tags each, with these weights, and every fifth one without any."""
    lines = ["tags,w,y", *(f"a;b;{i % 9},{weights},{i % 2}" if i % 5 else f",,{i % 2}" for i in range(200))]
    (folder / "a.csv").write_text("\n".join(lines))
    column: dict[str, Any] = {"column": "tags", "separator": ";", "pooling": "weighted", "weights": "w"}
    return _config(folder, label="y", dense=[], sparse=[column])


@every(
    ("weights", "rms"),
    [("38;52;17", "38.5"), ("-900;900;0", "735"), ("0.01;0.01;17.4", "10"),
     *((ordinary, None) for ordinary in ("1;1;1", "5;3;1", "0;0;0", "9.9;9.9;9.9"))],
)  # fmt: skip
def test_weights_of_ages_are_doubtful_and_ordinary_ones_are_not(tmp_path: Path, weights: str, rms: str | None) -> None:
    told = doubtful_weights(_entries(tmp_path, weights).train)
    line = f"feature tags: its weights have a root mean square of {rms}, so its pooled rows are "
    assert len(told) == (rms is not None) and all(text.startswith(line) for text in told)


def test_a_job_tells_of_doubtful_weights_once_at_its_start(tmp_path: Path) -> None:
    config = parse_config(
        "{servers: 1, workers: 2, consistency: {mode: sync}, model: {name: dlrm, hidden: [4]}, "
        "tower: {compile: off}, train: {batch_size: 8, epochs: 2}}"
    )
    job = LocalJob(config, _entries(tmp_path, "38;52;17"))
    job.run()
    told = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "data"]
    assert len(told) == 1 and told[0].startswith("warning: feature tags: its weights have a root mean square of 38.5")
