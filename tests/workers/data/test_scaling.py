"""Scaling of dense columns: formulas, training rows only, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

VALUES = np.array([-3.0, 0.0, 1.0, 2.0, 50.0])


def _open(folder: Path, values: list[float | None], held: list[float] | None = None, **settings: Any) -> Data:
    for name, column in (("a.csv", values), ("b.csv", held or [])):
        lines = "".join(f"{'' if x is None else repr(float(x))},{i % 2}\n" for i, x in enumerate(column))
        (folder / name).write_text("x,y\n" + lines)
    base: dict[str, Any] = {"source": "csv", "root": str(folder), "train": ["a.csv"], "label": "y", "dense": ["x"]}
    if held:
        base["eval"] = ["b.csv"]
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _log(x: Any) -> Any:
    return np.sign(x) * np.log1p(np.abs(x))


def _standard(x: Any, over: Any) -> Any:
    return (x - over.mean()) / over.std()


@every(
    ("scale", "expected"),
    [
        ("none", VALUES),
        ("log", _log(VALUES)),
        ("standard", _standard(VALUES, VALUES)),
        ("log_standard", _standard(_log(VALUES), _log(VALUES))),
        (None, _standard(VALUES, VALUES)),
    ],
)
def test_each_scale_follows_its_formula(tmp_path: Path, scale: str | None, expected: Any) -> None:
    data = _open(tmp_path, VALUES.tolist(), scale=scale)
    assert data.train.gather(np.arange(5)).dense_BI[:, 0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_evaluation_data_is_scaled_by_the_training_datas_statistics(tmp_path: Path) -> None:
    held = np.array([1000.0, 2000.0])
    data = _open(tmp_path, VALUES.tolist(), held.tolist())
    assert data.eval is not None
    assert data.eval.gather(np.arange(2)).dense_BI[:, 0] == pytest.approx(_standard(held, VALUES), rel=1e-5)


@every(("fill", "raw"), [("mean", 4.0), (7.0, 7.0)], ids=["mean", "7"])
@every("scale", ["none", "log", "standard", "log_standard"])
def test_missing_values_are_filled_before_scaling(tmp_path: Path, fill: Any, raw: float, scale: str) -> None:
    data = _open(tmp_path, [2.0, None, 6.0], dense=[{"column": "x", "fill": fill, "scale": scale}])
    present = np.array([2.0, 6.0])
    expected: float = raw
    if scale.startswith("log"):
        expected, present = _log(raw), _log(present)
    if scale.endswith("standard"):
        expected = _standard(expected, present)
    assert float(data.train.gather(np.array([1])).dense_BI[0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_statistics_of_a_split_are_those_of_its_training_rows(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(5, 3, 4000)
    data = _open(tmp_path, values.tolist(), eval_fraction=0.5)
    assert data.eval is not None
    train = data.train.gather(np.arange(len(data.train))).dense_BI.astype(np.float64)
    held = data.eval.gather(np.arange(len(data.eval))).dense_BI.astype(np.float64)
    assert abs(train.mean()) < 1e-5 and abs(train.std() - 1) < 1e-5
    assert abs(held.mean()) > 1e-4


def test_constant_and_huge_columns_keep_what_they_can(tmp_path: Path) -> None:
    constant = _open(tmp_path, [7.0] * 4)
    assert constant.train.gather(np.arange(4)).dense_BI.tolist() == [[0.0]] * 4
    stamps = 1.7e9 + np.arange(100.0)
    found = _open(tmp_path, stamps.tolist()).train.gather(np.arange(100)).dense_BI[:, 0]
    assert found == pytest.approx(_standard(stamps, stamps), rel=1e-4, abs=1e-5)
    found = _open(tmp_path, [1e200, 1.0], scale="log").train.gather(np.arange(2)).dense_BI[:, 0]
    assert found == pytest.approx(np.log1p([1e200, 1.0]), rel=1e-6), "beyond float32"


def test_statistics_span_chunks(tmp_path: Path) -> None:
    values = np.concatenate([np.full(66_000, -1.0), np.linspace(0, 1000, 20_000)])
    found = _open(tmp_path, values.tolist()).train.gather(np.array([0, 85_999])).dense_BI[:, 0]
    assert found == pytest.approx(_standard(values, values)[[0, -1]], rel=1e-4)


def test_the_hash_of_texts_never_changes() -> None:
    assert hash_text(b"") == MISSING_ID == 0x2D06800538D394C2
    assert hash_text(b"y") == 2822446240451570149
