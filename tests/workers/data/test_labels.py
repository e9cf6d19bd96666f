"""Labels and weights of samples: what is missing is an error, left out or masked, never class 0."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.config import parse_config
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.samples import Data, doubtful_weights
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import batch_of, first_column, labels_of, opened, refusal, write_file
from tests.support.local_job import LocalJob

NUMBER = {"column": "y", "kind": "number"}
SKIP = {"column": "y", "missing": "skip"}


def _file(labels: list[str]) -> dict[str, str]:
    return {"a.csv": "\n".join(["x,y", *(f"{i},{label}" for i, label in enumerate(labels))])}


def _rows(data: Data) -> list[tuple[float, float]]:
    return list(zip(first_column(data.train), labels_of(data), strict=True))


@every("text", ["?", "", " NA ", "null", "nan", "-9"])
@every("positive", [["yes"], None])
def test_a_missing_label_is_an_error_that_counts_them(tmp_path: Path, text: str, positive: list[str] | None) -> None:
    one, zero = ("yes", "no") if positive else ("1", "0")
    files, label = _file([one, zero, text, one, text, zero]), {"column": "y", "positive": positive}
    settings: dict[str, Any] = {"dense": ["x"], "missing": ["", "?", "NA", "null", "nan", "-9"]}
    where = "a.csv, row 3, column y: the label is missing (2 of 6 rows); data.label.missing: skip leaves such rows"
    assert where in refusal(tmp_path, files, label=label, **settings)
    data = opened(tmp_path, files, label=label | SKIP, **settings)
    assert _rows(data) == [(0.0, 1.0), (1.0, 0.0), (3.0, 1.0), (5.0, 0.0)]
    assert "2 rows left out, their label is missing" in data.describe()


@every(
    "values",
    [
        pa.array([1, None, 0, None]),
        pa.array([1.0, float("nan"), 0.0, None]),
        pa.array([True, None, False, None]),
        pa.array(["1", None, "0", "?"]),
        pa.array(["1", "?", "0", None]).dictionary_encode(),
    ],
)
@every("positive", [None, ["1"], {"above": 0.5}])
def test_nulls_of_any_type_are_missing(tmp_path: Path, values: Any, positive: Any) -> None:
    files, label = {"a.parquet": {"x": [0, 1, 2, 3], "y": values}}, {"column": "y", "positive": positive}
    line = refusal(tmp_path, files, dense=["x"], label=label)
    assert "row 2, column y: the label is missing (2 of 4 rows)" in line
    assert _rows(opened(tmp_path, files, dense=["x"], label=label | SKIP)) == [(0.0, 1.0), (2.0, 0.0)]


def test_a_number_that_means_one_is_compared_as_its_column_holds_it(tmp_path: Path) -> None:
    files = {"a.parquet": {"x": [0, 1], "y": np.float32([0.1, 0.2])}}
    assert labels_of(opened(tmp_path, files, dense=["x"], label={"column": "y", "positive": [0.1]})) == [1.0, 0.0]


def test_left_out_rows_do_not_enter_the_statistics_nor_move_the_split(tmp_path: Path) -> None:
    whole = ["1", "0"] * 50
    holes = [text if i % 10 else "?" for i, text in enumerate(whole)]
    data, full = (opened(tmp_path, _file(labels), dense=["x"], label=SKIP, split="random") for labels in (holes, whole))
    assert (
        data.eval is not None
        and set(_rows(data)) < set(_rows(full))
        and len(data.train) + len(data.eval) + len(data.test or ()) == 90
    )
    scaled = opened(tmp_path, _file(["0", "?", "1"]), dense=["x"], label=SKIP, scale="standard")
    assert first_column(scaled.train) == [-1.0, 1.0]
    (tmp_path / "own_labels.py").write_text(
        "TRAIN = {'label': [0, None, 1], 'dense': {'x': [1.0, 2.0, 3.0]}}\n"
        "def samples(split):\n    return TRAIN if split == 'train' else None\n"
    )
    own = opened(tmp_path, source="own_labels:samples", train=[], label={"column": "label", "missing": "skip"})
    assert _rows(own) == [(1.0, 0.0), (3.0, 1.0)] and "1 rows left out, their label is missing" in own.describe()


@every(
    ("texts", "label", "what"),
    [
        ("1 many 0", NUMBER, "row 2, column y: 'many' is not a number"),
        ("1 1e39 0", NUMBER, "row 2, column y: the label is beyond float32"),
        ("? ? ?", SKIP, r"the label is missing \(3 of 3 rows\)$"),
    ],
)
def test_a_label_that_is_none_is_named_with_its_row(tmp_path: Path, texts: str, label: Any, what: str) -> None:
    line = refusal(tmp_path, _file(texts.split()), dense=["x"], label=label)
    assert re.search(f"a.csv, .*{what}", line), line


# Several labels

NAN = float("nan")
CLICKED, BOUGHT = [1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0]
SECONDS = [5.5, None, 2.0, None, 9.25, 0.0]
AFTER, GIVEN = {"column": "bought", "after": "clicked"}, {"column": "bought", "given": "clicked"}
MASKED = {"missing": "mask"}
TIMES = {"column": "seconds", "loss": "mse"}


def _several(
    folder: Path, labels: list[Any], kind: str = "parquet", *, columns: Mapping[str, Any] = {}, **settings: Any
) -> Data:
    values = {"x": list(range(6)), "clicked": CLICKED, "bought": BOUGHT, "seconds": SECONDS, **columns}
    write_file(folder / f"a.{kind}", values)
    base = {"train": f"a.{kind}", "dense": ["x"], "label": None, "labels": labels}
    return opened(folder, **base | settings)


def _equal(data: Data, *columns: list[float]) -> None:
    np.testing.assert_array_equal(batch_of(data.train).label_BT, np.array(columns).T)


@every("kind", ["csv", "parquet"])
def test_labels_of_each_kind_are_read_and_found_again_in_the_cache(tmp_path: Path, kind: str) -> None:
    seconds = [NAN if value is None else value for value in SECONDS]
    first = _several(tmp_path, ["clicked", TIMES | MASKED, {"column": "bought", "positive": "1"}], kind)
    assert first.train.schema.labels == ("clicked", "seconds", "bought")
    (column,) = (tmp_path / ".shardkeep-cache").glob("a-*/label-*.column")
    made = column.stat().st_ino
    other = TIMES | MASKED | {"loss": "huber", "weight": 3.0}
    again = opened(
        tmp_path, train=f"a.{kind}", dense=["x"], label=None,
        labels=["clicked", other, {"column": "bought", "positive": "1"}],
    )  # fmt: skip
    for data in (first, again):
        _equal(data, CLICKED, seconds, BOUGHT)
    assert (first.fingerprint, column.stat().st_ino) == (again.fingerprint, made)


def test_means_count_the_samples_that_have_the_label(tmp_path: Path) -> None:
    data = _several(tmp_path, ["clicked", AFTER, TIMES | MASKED])
    np.testing.assert_allclose(data.label_means, [3 / 6, 2 / 6, 16.75 / 4])
    np.testing.assert_allclose(data.conditional_means, [3 / 6, 2 / 3, 16.75 / 4])


@every(
    ("columns", "labels", "found"),
    [
        ({}, ["clicked", GIVEN], [CLICKED, [1, NAN, 0, 1, NAN, NAN]]),
        # one that is missing outside of its condition is no error
        ({"bought": [1, None, 0, 1, None, None]}, ["clicked", GIVEN], [CLICKED, [1, NAN, 0, 1, NAN, NAN]]),
        ({"bought": [1, 0, 0, 1, 1, 0]}, ["clicked", AFTER | MASKED], [CLICKED, [1, 0, 0, 1, NAN, 0]]),
        ({"clicked": [1, None, 1, 0, None, 0]}, [{"column": "clicked", "missing": "skip"}, "bought"],
         [[1, 1, 0, 0], [1, 0, 1, 0]]),
    ],
)  # fmt: skip
def test_labels_are_masked_or_their_rows_left_out(
    tmp_path: Path, columns: Any, labels: list[Any], found: list[list[float]]
) -> None:
    data = _several(tmp_path, labels, columns=columns)
    _equal(data, *found)
    assert ("2 rows left out, their label is missing" in data.describe()) == (len(found[0]) == 4)


@every(
    ("columns", "label", "why"),
    [
        ({"bought": [1, None, None, 1, None, None]}, GIVEN,
         r"a.parquet, row 3, column bought: the label is missing \(1 of 6 rows\); data.labels.bought.missing: mask"),
        ({"bought": [1, 0, 0, 1, 1, 0]}, AFTER,
         r"a.parquet, row 5, column bought: is 1 and clicked is 0, .*allowed: missing: mask, or mend the data"),
        ({}, TIMES,
         r"a.parquet, row 2, column seconds: the label is missing \(2 of 6 rows\); data.labels.seconds.missing: mask"),
        ({"bought": [0] * 6}, "bought", "label column bought: all 6 rows of the training data are class 0"),
        ({"bought": [1, 0, 1, 1, 0, 0]}, GIVEN, "label column bought: all 3 rows of the training data are class 1"),
        ({"bought": [None] * 6}, {"column": "bought"} | MASKED,
         r"column bought: the label is missing \(6 of 6 rows\)"),
        ({}, {"column": "seconds"}, "data.labels.seconds.positive, or data.labels.seconds.loss: mse for numbers"),
        ({}, {"column": "bought", "positive": ["1", "yes"]},
         "data.labels.bought.positive: no row of the data has 'yes'"),
    ],
)  # fmt: skip
def test_a_label_that_cannot_be_learned_is_named(tmp_path: Path, columns: Any, label: Any, why: str) -> None:
    files = {"a.parquet": {"x": list(range(6)), "clicked": CLICKED, "bought": BOUGHT, "seconds": SECONDS} | columns}
    line = refusal(tmp_path, files, dense=["x"], label=None, labels=["clicked", label])
    assert re.search(why, line), line


@every(
    ("settings", "use"),
    [({"dense": ["x", "bought"]}, "dense"), ({"sparse": ["bought"]}, "sparse"), ({"weight": "bought"}, "weight"),
     ({"time": "bought"}, "time")],
)  # fmt: skip
def test_a_label_of_another_use_is_named_and_no_pattern_takes_one(
    tmp_path: Path, settings: dict[str, Any], use: str
) -> None:
    with pytest.raises(ConfigError, match=f"data.{use}: names bought, which is a label"):
        _several(tmp_path, ["clicked", "bought"], **settings)
    columns = {"returned": CLICKED}
    data = _several(tmp_path, ["clicked", "bought"], columns=columns, dense=["*"], sparse=[])
    assert data.train.schema.dense == ("x", "seconds", "returned")
    one, other = (_several(tmp_path, ["bought", name], columns=columns) for name in ("returned", "clicked"))
    assert one.fingerprint != other.fingerprint, "other labels are other data"


def test_the_inputs_of_several_labels_have_one_form_with_those_of_one(tmp_path: Path) -> None:
    record = json.loads(json.dumps(_several(tmp_path, ["clicked", AFTER | {"weight": 0.5}]).inputs))
    assert (record["form"], "label" in record) == (FORM, False)
    inputs = Inputs.of_json(record)
    tasks = [(task.column, task.after, task.weight) for task in inputs.layout.schema.tasks]
    assert tasks == [("clicked", None, 1.0), ("bought", "clicked", 0.5)] and inputs.to_json() == record
    one = opened(tmp_path, train="a.parquet", dense=["x"], label="clicked").inputs
    assert one is not None and one["form"] == FORM and "labels" not in one
    for wrong in ({"form": FORM - 1}, {"label": one["label"]}):
        with pytest.raises(ValueError, match=r"form: |label: is there beside labels"):
            Inputs.of_json(record | wrong)


# Weights of samples


def test_no_pattern_takes_the_column_of_weights_and_a_part_of_a_batch_has_its_own(tmp_path: Path) -> None:
    columns = {"x": [0.0, 1.0, 2.0], "y": [0, 1, 0], "w": [0.5, 2.0, 1e3]}
    data = opened(tmp_path, {"a.parquet": columns}, dense=["*"], weight="w")
    part = data.train.gather(np.array([2, 0, 1])).slice(1, 3)
    assert data.train.schema.dense == ("x",) and part.weight_B is not None and part.weight_B.tolist() == [0.5, 2.0]


@every("form", ["csv", "parquet"])
@every(("text", "what"), [("-0.5", "is -0.5"), ("", "is missing")])
def test_a_weight_that_is_none_is_named_with_its_row(tmp_path: Path, form: str, text: str, what: str) -> None:
    columns = {"x": [0, 1, 2, 3], "y": [0, 1, 0, 1], "w": [1, 1, float(text) if text else None, 1]}
    line = refusal(tmp_path, {f"a.{form}": columns}, dense=["x"], weight="w")
    assert re.search(f"a.{form}, row 3, column w: the weight {what}; allowed: numbers from 0 on", line), line


def test_the_label_is_no_weight(tmp_path: Path) -> None:
    line = refusal(tmp_path, _file(["0", "1"]), dense=["x"], weight="y")
    assert "data.weight: names y, which is the label" in line
    with pytest.raises(ValueError, match="positive: has no effect with kind: number"):
        DataConfig.model_validate({"train": "a.csv", "label": NUMBER | {"positive": ["yes"]}})


# Weights of entries


def _entries(folder: Path, weights: str) -> Data:
    """200 samples; of three tags each, with these weights, and every fifth one without any."""
    lines = ["tags,w,y", *(f"a;b;{i % 9},{weights},{i % 2}" if i % 5 else f",,{i % 2}" for i in range(200))]
    column: dict[str, Any] = {"column": "tags", "separator": ";", "pooling": "weighted", "weights": "w"}
    return opened(folder, {"a.csv": "\n".join(lines)}, sparse=[column])


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
