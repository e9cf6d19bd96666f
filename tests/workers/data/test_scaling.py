"""Scaling of dense columns: formulas, training rows only, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.samples import Data
from tests.support.cases import every
from tests.support.data_files import first_column, opened

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
    assert first_column(data.train) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_evaluation_data_are_scaled_by_the_statistics_of_the_training_rows(tmp_path: Path) -> None:
    held = np.array([1000.0, 2000.0])
    data = _open(tmp_path, VALUES.tolist(), held.tolist())
    assert first_column(data.eval) == pytest.approx(_standard(held, VALUES), rel=1e-5)
    values = np.random.default_rng(0).normal(5, 3, 4000)
    data = _open(tmp_path, values.tolist(), eval_fraction=0.5)
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
