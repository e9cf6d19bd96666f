"""Several labels: from columns to samples, by way of the cache; what is masked, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

NAN = float("nan")
CLICKED, BOUGHT = [1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0]
SECONDS = [5.5, None, 2.0, None, 9.25, 0.0]


def _write(folder: Path, kind: str = "parquet", **columns: list[Any]) -> None:
    values = {"x": list(range(6)), "clicked": CLICKED, "bought": BOUGHT, "seconds": SECONDS} | columns
    table = pa.table(values)
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet")
    else:
        pacsv.write_csv(table, folder / "a.csv")


def _open(folder: Path, labels: list[Any], kind: str = "parquet", **settings: Any) -> Data:
    base = {"root": str(folder), "train": f"a.{kind}", "dense": ["x"], "scale": "none", "labels": labels}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


@every("scalar", ["weight", "time"])
def test_labels_stand_beside_a_weight_or_a_time(tmp_path: Path, scalar: str) -> None:
    _write(tmp_path)
    alone = _open(tmp_path, ["clicked", "bought"]).train.gather(np.arange(6))
    both = _open(tmp_path, ["clicked", "bought"], **{scalar: "x"}).train.gather(np.arange(6))
    assert np.array_equal(both.label_BT, alone.label_BT) and (both.weight_B is not None) == (scalar == "weight")


def _labels(data: Data) -> list[list[float]]:
    found: list[list[float]] = data.train.gather(np.arange(len(data.train))).label_BT.tolist()
    return found


def _equal(data: Data, *columns: list[float]) -> None:
    np.testing.assert_array_equal(np.array(_labels(data)), np.array(columns).T)


@every("kind", ["csv", "parquet"])
def test_labels_of_each_kind_are_read_and_found_again_in_the_cache(tmp_path: Path, kind: str) -> None:
    _write(tmp_path, kind)
    labels = ["clicked", {"column": "seconds", "loss": "mse", "missing": "mask"}, {"column": "bought", "positive": "1"}]
    seconds = [NAN if value is None else value for value in SECONDS]
    first = _open(tmp_path, labels, kind)
    _equal(first, CLICKED, seconds, BOUGHT)
    assert first.train.schema.labels == ("clicked", "seconds", "bought")
    (entry,) = (tmp_path / ".shardkeep-cache").glob("a-*/meta.json")
    made = entry.stat().st_ino
    again = _open(tmp_path, [*labels[:1], labels[1] | {"loss": "huber", "weight": 3.0}, *labels[2:]], kind)
    _equal(again, CLICKED, seconds, BOUGHT)
    assert (first.fingerprint, entry.stat().st_ino) == (again.fingerprint, made)


def test_means_count_the_samples_that_have_the_label(tmp_path: Path) -> None:
    _write(tmp_path)
    labels = [
        "clicked",
        {"column": "bought", "after": "clicked"},
        {"column": "seconds", "loss": "mse", "missing": "mask"},
    ]
    data = _open(tmp_path, labels)
    np.testing.assert_allclose(data.label_means, [3 / 6, 2 / 6, 16.75 / 4])
    np.testing.assert_allclose(data.conditional_means, [3 / 6, 2 / 3, 16.75 / 4])


def test_a_given_label_masks_where_it_is_not_one(tmp_path: Path) -> None:
    _write(tmp_path)
    labels = ["clicked", {"column": "bought", "given": "clicked"}]
    _equal(_open(tmp_path, labels), CLICKED, [1, NAN, 0, 1, NAN, NAN])


def test_a_label_that_is_missing_outside_of_its_condition_is_no_error(tmp_path: Path) -> None:
    _write(tmp_path, bought=[1, None, 0, 1, None, None])
    _equal(_open(tmp_path, ["clicked", {"column": "bought", "given": "clicked"}]), CLICKED, [1, NAN, 0, 1, NAN, NAN])
    _write(tmp_path, bought=[1, None, None, 1, None, None])
    why = r"a.parquet, row 3, column bought: the label is missing \(1 of 6 rows\); data.labels.bought.missing: mask"
    with pytest.raises(DataError, match=why):
        _open(tmp_path, ["clicked", {"column": "bought", "given": "clicked"}])


def test_a_label_after_one_that_is_zero_is_refused_or_masked(tmp_path: Path) -> None:
    _write(tmp_path, bought=[1, 0, 0, 1, 1, 0])
    after = {"column": "bought", "after": "clicked"}
    why = r"a.parquet, row 5, column bought: is 1 and clicked is 0, .*allowed: missing: mask, or mend the data"
    with pytest.raises(DataError, match=why):
        _open(tmp_path, ["clicked", after])
    _equal(_open(tmp_path, ["clicked", after | {"missing": "mask"}]), CLICKED, [1, 0, 0, 1, NAN, 0])


def test_the_first_label_may_leave_rows_out(tmp_path: Path) -> None:
    _write(tmp_path, clicked=[1, None, 1, 0, None, 0])
    data = _open(tmp_path, [{"column": "clicked", "missing": "skip"}, "bought"])
    _equal(data, [1, 1, 0, 0], [1, 0, 1, 0])
    assert "2 rows left out, their label is missing" in data.describe()


def test_a_missing_label_is_an_error_that_names_it(tmp_path: Path) -> None:
    _write(tmp_path)
    labels = ["clicked", {"column": "seconds", "loss": "mse"}]
    why = r"a.parquet, row 2, column seconds: the label is missing \(2 of 6 rows\); data.labels.seconds.missing: mask"
    with pytest.raises(DataError, match=why):
        _open(tmp_path, labels)


@every(
    ("columns", "label", "why"),
    [
        ({"bought": [0] * 6}, "bought", "label column bought: all 6 rows of the training data are class 0"),
        (
            {"bought": [1, 0, 1, 1, 0, 0]},
            {"column": "bought", "given": "clicked"},
            "label column bought: all 3 rows of the training data are class 1",
        ),
        (
            {"bought": [None] * 6},
            {"column": "bought", "missing": "mask"},
            r"column bought: the label is missing \(6 of 6 rows\)",
        ),
        ({}, {"column": "seconds"}, "data.labels.seconds.positive, or data.labels.seconds.loss: mse for numbers"),
        (
            {},
            {"column": "bought", "positive": ["1", "yes"]},
            "data.labels.bought.positive: no row of the data has 'yes'",
        ),
    ],
    ids=["one class", "one class where it is given", "nowhere", "a number", "a value that no row has"],
)
def test_a_label_that_cannot_be_learned_is_named(tmp_path: Path, columns: Any, label: Any, why: str) -> None:
    _write(tmp_path, **columns)
    with pytest.raises(DataError, match=why):
        _open(tmp_path, ["clicked", label])


@every(
    ("settings", "why"),
    [
        ({"dense": ["x", "bought"]}, "data.dense: names bought, which is a label"),
        ({"sparse": ["clicked"]}, "data.sparse: names clicked, which is a label"),
        ({"weight": "bought"}, "data.weight: names bought, which is a label"),
        ({"time": "clicked"}, "data.time: names clicked, which is a label"),
    ],
)
def test_a_label_of_another_use_is_named(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    _write(tmp_path)
    with pytest.raises(ConfigError, match=why):
        _open(tmp_path, ["clicked", "bought"], **settings)


def test_a_pattern_of_columns_leaves_all_labels_out(tmp_path: Path) -> None:
    _write(tmp_path)
    data = _open(tmp_path, ["clicked", "bought"], dense=["*"], sparse=[])
    assert data.train.schema.dense == ("x", "seconds")


def test_the_inputs_of_several_labels_have_a_form_that_older_readers_refuse(tmp_path: Path) -> None:
    _write(tmp_path)
    labels = ["clicked", {"column": "bought", "after": "clicked", "weight": 0.5}]
    record = json.loads(json.dumps(_open(tmp_path, labels).inputs))
    assert (record["form"], "label" in record) == (3, False)
    inputs = Inputs.of_json(record)
    assert [(task.column, task.after, task.weight) for task in inputs.layout.schema.tasks] == [
        ("clicked", None, 1.0), ("bought", "clicked", 0.5),
    ]  # fmt: skip
    assert inputs.to_json() == record
    one = open_data(
        DataConfig.model_validate({"root": str(tmp_path), "train": "a.parquet", "dense": ["x"], "label": "clicked"}),
        seed=0,
    )
    assert one.inputs is not None and one.inputs["form"] == 2 and "labels" not in one.inputs
    with pytest.raises(ValueError, match="label: is missing, or is not of this form"):
        Inputs.of_json(record | {"form": 2})


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    _write(tmp_path, returned=CLICKED, again=CLICKED)
    one, other = (_open(tmp_path, ["bought", name]) for name in ("returned", "again"))
    assert one.fingerprint != other.fingerprint
