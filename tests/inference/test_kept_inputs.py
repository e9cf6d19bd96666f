"""What training has fitted is kept under a model that continues, and every source's model is usable after training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.base.errors import ConfigError
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.inference.server.served_model import ServedModel
from tests.support.serving import Server, raw_request, scores_of

MODEL = {"name": "dlrm", "bottom": [5], "hidden": [6]}


def job(data: dict[str, Any], **changes: Any) -> shardkeep.JobConfig:
    settings: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "data": data,
        "model": MODEL,
        "tables": {"default": {"dim": 4}},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": 32},
    }
    return shardkeep.JobConfig.model_validate(settings | changes)


def day(path: Path, mean: float, seed: int) -> Path:
    """Rows of one law; only the prices of the day differ."""
    random = np.random.default_rng(seed)
    price = np.round(random.normal(mean, 6, 300), 2)
    item = random.integers(0, 9, 300)
    click = (random.random(300) < 1 / (1 + np.exp((price - 30) / 5))).astype(int)
    lines = ["click,item,price", *(f"{c},{i},{p}" for c, i, p in zip(click, item, price, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def daily(folder: Path, train: str, **changes: Any) -> dict[str, Any]:
    data = {"root": str(folder), "train": train, "eval": "eval.csv", "label": "click", "sparse": ["item"]}
    return data | {"dense": ["price"]} | changes


@pytest.fixture(scope="module")
def monday(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with days and a run of Monday's."""
    folder = tmp_path_factory.mktemp("days")
    for name, mean, seed in (("monday", 30, 1), ("tuesday", 20, 2), ("eval", 30, 3)):
        day(folder / f"{name}.csv", mean, seed)
    shardkeep.train(job(daily(folder, "monday.csv")), run_dir=folder / "run", quiet=True)
    return folder


def transform(run: Path) -> dict[str, Any]:
    return shardkeep.load(run).inputs.to_json()["transform"]  # type: ignore[no-any-return]


def test_a_model_that_continues_keeps_its_scaling(monday: Path, tmp_path: Path) -> None:
    config = job(daily(monday, "tuesday.csv"), train={"batch_size": 32, "max_steps": 1})
    shardkeep.train(config, run_dir=tmp_path / "next", quiet=True, from_run=monday / "run")
    assert transform(tmp_path / "next") == transform(monday / "run")
    before, after = evaluate_run(monday / "run"), evaluate_run(tmp_path / "next")
    assert after["logloss"] == pytest.approx(before["logloss"], abs=0.02)


def test_refit_fits_again(monday: Path, tmp_path: Path) -> None:
    config = job(daily(monday, "tuesday.csv", refit=True), train={"batch_size": 32, "max_steps": 1})
    shardkeep.train(config, run_dir=tmp_path / "next", quiet=True, from_run=monday / "run")
    fresh = job(daily(monday, "tuesday.csv"), train={"batch_size": 32, "max_steps": 1})
    shardkeep.train(fresh, run_dir=tmp_path / "fresh", quiet=True)
    assert transform(tmp_path / "next") == transform(tmp_path / "fresh") != transform(monday / "run")


def test_resume_with_more_rows_keeps_scaling_and_calls_the_evaluation_data_unchanged(tmp_path: Path) -> None:
    for name, mean, seed in (("monday", 30, 1), ("eval", 30, 3)):
        day(tmp_path / f"{name}.csv", mean, seed)
    config = job(daily(tmp_path, "*day.csv"))
    shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    before = transform(tmp_path / "run")
    day(tmp_path / "tuesday.csv", 20, 2)
    with pytest.raises(ConfigError) as refused:
        shardkeep.resume(tmp_path / "run", overrides=["train.epochs=3"], quiet=True)
    text = str(refused.value)
    assert "evaluation" not in text, text
    accepted = text.split("data.accept=")[1].split()[0].strip("'\".,;")
    shardkeep.resume(tmp_path / "run", overrides=["train.epochs=3", f"data.accept={accepted}"], quiet=True)
    assert transform(tmp_path / "run") == before


# Sources whose columns are no files


SOURCE = """
import numpy as np

def rows(split):
    random = np.random.default_rng(split == "eval")
    user = random.integers(0, 9, 200)
    tags = [random.integers(0, 5, random.integers(0, 4)).tolist() for _ in user]
    weights = [[0.5] * len(row) for row in tags]
    sparse = {"user": user, "word": [f"w{u % 3}" for u in user], "tags": tags, "tags_w": weights}
    return {"label": (user % 3 == 0).astype(int), "dense": {"x": user / 2}, "sparse": sparse}
"""
COLUMNS = {"user": [3, 4], "word": ["w0", "w1"], "tags": [[1, 2], []], "tags_w": [[1.0, 0.5], []], "x": [1.5, 2.0]}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "rows_of_mine.py").write_text(SOURCE)
    yield "rows_of_mine:rows"
    sys.modules.pop("rows_of_mine", None)


@pytest.fixture
def own(tmp_path: Path, source: str) -> Path:
    tags = {"column": "tags", "pooling": "weighted", "weights": "tags_w"}
    data = {"source": source, "root": str(tmp_path), "dense": ["x"], "sparse": ["user", "word", tags]}
    shardkeep.train(job(data), run_dir=tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_a_model_of_a_source_of_ones_own_takes_columns_everywhere(own: Path, tmp_path: Path) -> None:
    right_N = shardkeep.load(own).predict(COLUMNS)
    pq.write_table(pa.table(COLUMNS), tmp_path / "new.parquet")
    predict_files(own, [tmp_path / "new.parquet"], tmp_path / "s.parquet")
    assert pq.read_table(tmp_path / "s.parquet").column("score").to_pylist() == right_N.tolist()
    export_run(own, tmp_path / "model")
    assert shardkeep.load(tmp_path / "model").predict(COLUMNS).tolist() == right_N.tolist()
    with Server(ServedModel(shardkeep.load(own))) as server:
        request = {
            "user": np.array([3, 4]), "word": [b"w0", b"w1"], "x": np.array([1.5, 2.0]),
            "tags.values": np.array([1, 2]), "tags.lengths": np.array([2, 0], np.int32),
            "tags_w.values": np.array([1.0, 0.5]), "tags_w.lengths": np.array([2, 0], np.int32),
        }  # fmt: skip
        assert np.abs(scores_of(server.infer(raw_request(request))) - right_N).max() < 1e-6


def test_the_synthetic_model_can_be_exported_and_takes_its_columns(tmp_path: Path) -> None:
    stream = {"train_samples": 200, "eval_samples": 50, "num_dense": 2, "table_sizes": [20, 30]}
    shardkeep.train(job({"source": "synthetic", "synthetic": stream}), run_dir=tmp_path / "run", quiet=True)
    export_run(tmp_path / "run", tmp_path / "model")
    predictor = shardkeep.load(tmp_path / "model")
    columns = {name: [1, 2, 3] for name in predictor.columns}
    assert predictor.predict(columns).tolist() == shardkeep.load(tmp_path / "run").predict(columns).tolist()
