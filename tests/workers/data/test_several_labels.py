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


GIVEN, AFTER = {"column": "bought", "given": "clicked"}, {"column": "bought", "after": "clicked"}
MASKED = {"missing": "mask"}


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
    ids=["given", "missing where it is not given", "after", "rows left out"],
)  # fmt: skip
def test_labels_are_masked_or_their_rows_left_out(
    tmp_path: Path, columns: Any, labels: list[Any], found: list[list[float]]
) -> None:
    _write(tmp_path, **columns)
    data = _open(tmp_path, labels)
    _equal(data, *found)
    assert ("2 rows left out, their label is missing" in data.describe()) == (len(found[0]) == 4)


@every(
    ("columns", "label", "why"),
    [
        ({"bought": [1, None, None, 1, None, None]}, GIVEN,
         r"a.parquet, row 3, column bought: the label is missing \(1 of 6 rows\); data.labels.bought.missing: mask"),
        ({"bought": [1, 0, 0, 1, 1, 0]}, AFTER,
         r"a.parquet, row 5, column bought: is 1 and clicked is 0, .*allowed: missing: mask, or mend the data"),
        ({}, {"column": "seconds", "loss": "mse"},
         r"a.parquet, row 2, column seconds: the label is missing \(2 of 6 rows\); data.labels.seconds.missing: mask"),
        ({"bought": [0] * 6}, "bought", "label column bought: all 6 rows of the training data are class 0"),
        ({"bought": [1, 0, 1, 1, 0, 0]}, GIVEN, "label column bought: all 3 rows of the training data are class 1"),
        ({"bought": [None] * 6}, {"column": "bought"} | MASKED,
         r"column bought: the label is missing \(6 of 6 rows\)"),
        ({}, {"column": "seconds"}, "data.labels.seconds.positive, or data.labels.seconds.loss: mse for numbers"),
        ({}, {"column": "bought", "positive": ["1", "yes"]},
         "data.labels.bought.positive: no row of the data has 'yes'"),
    ],
    ids=["missing where it is given", "one after zero", "missing", "one class", "one class where it is given",
         "nowhere", "a number", "a value that no row has"],
)  # fmt: skip
def test_a_label_that_cannot_be_learned_is_named(tmp_path: Path, columns: Any, label: Any, why: str) -> None:
    _write(tmp_path, **columns)
    with pytest.raises(DataError, match=why):
        _open(tmp_path, ["clicked", label])


@every(
    ("settings", "use"),
    [({"dense": ["x", "bought"]}, "dense"), ({"sparse": ["bought"]}, "sparse"), ({"weight": "bought"}, "weight"),
     ({"time": "bought"}, "time")],
)  # fmt: skip
def test_a_label_of_another_use_is_named(tmp_path: Path, settings: dict[str, Any], use: str) -> None:
    _write(tmp_path)
    with pytest.raises(ConfigError, match=f"data.{use}: names bought, which is a label"):
        _open(tmp_path, ["clicked", "bought"], **settings)


def test_a_pattern_of_columns_leaves_all_labels_out_and_other_labels_are_other_data(tmp_path: Path) -> None:
    _write(tmp_path, returned=CLICKED)
    data = _open(tmp_path, ["clicked", "bought"], dense=["*"], sparse=[])
    assert data.train.schema.dense == ("x", "seconds", "returned")
    one, other = (_open(tmp_path, ["bought", name]) for name in ("returned", "clicked"))
    assert one.fingerprint != other.fingerprint


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
