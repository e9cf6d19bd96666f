"""Runs whose tables have rows of fewer than 32 bits a value: evaluate, predict, export, tables and a warm start."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import app
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.scoring import evaluate_run
from tests.support.cases import every
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv

ROWS = {
    name: [row[name] for row in click_rows(130, seed=8)] + ["stranger"]
    for name in COLUMNS
    if name not in ("clicked", "price", "age")
} | {"price": ["1"] * 131, "age": ["30"] * 131}
TABLES = {
    "default": {"dim": 6, "dtype": "int8"},
    "item": {"dtype": "fp16", "optimizer": "adam", "state_dtype": "bf16"},
    "tags": {"dtype": "bf16"},
}

TABLE_PRECISIONS = {"item": {"rows": "fp16", "state": "bf16"}, "tags": {"rows": "bf16"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    job = click_job(write_csv(folder / "train.csv", click_rows(400)), tables=TABLES)
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


def test_a_run_scores_as_its_trainer_and_its_exports_score_as_the_run(run: Path, tmp_path: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert evaluate_run(run) == {"step": summary["steps"]} | summary["eval"]
    scores = shardkeep.load(run).predict(ROWS)
    export_run(run, tmp_path / "fp32")
    assert np.array_equal(shardkeep.load(tmp_path / "fp32").predict(ROWS), scores)
    export_run(run, tmp_path / "fp16", formats=Formats(rows="fp16"))
    halves = shardkeep.load(tmp_path / "fp16")
    assert np.array_equal(halves.rows("item", ROWS["item"]), shardkeep.load(run).rows("item", ROWS["item"]))
    export_run(run, tmp_path / "int8", formats=Formats(rows="int8"))
    assert np.allclose(shardkeep.load(tmp_path / "int8").predict(ROWS), scores, atol=0.02)


def test_rows_are_those_of_their_precision(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "item.npy"
    done = CliRunner().invoke(
        app, ["tables", "export", str(run), "--table", "item", "--format", "npy", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = np.load(tmp_path / "item.rows.npy")
    assert rows.dtype == np.float32 and np.array_equal(rows, rows.astype(np.float16).astype(np.float32))
    found = shardkeep.load(run).rows("item", np.load(tmp_path / "item.ids.npy"))
    assert np.array_equal(found, rows)


def test_the_figures_of_tables_have_the_bytes_of_their_precision(run: Path) -> None:
    done = CliRunner().invoke(app, ["tables", str(run), "--json"])
    assert done.exit_code == 0, done.output
    figures = {one["name"]: one for one in json.loads(done.output)["tables"]}
    expected = {"user": (8 + 8 + 4, 4), "item": (8 + 12, 24), "tags": (8 + 12, 4)}  # id, values, scale; slots
    for name, (row_bytes, slot_bytes) in expected.items():
        rows = figures[name]["rows"]
        assert figures[name]["precision"] == {"rows": "int8", "state": "fp32"} | TABLE_PRECISIONS.get(name, {})
        assert figures[name]["bytes"] == {"rows": rows * row_bytes, "optimizer": rows * slot_bytes}


@every("precision", ["fp32", "int8"])
def test_a_job_may_begin_with_rows_of_another_precision(run: Path, tmp_path: Path, precision: str) -> None:
    job = click_job(run.parent / "train.csv", tables={**TABLES, "default": {"dim": 6, "dtype": precision}})
    job["train"] = {"batch_size": 32, "max_steps": 1}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    done = CliRunner().invoke(app, ["train", str(path), "--from", str(run), "--run-dir", str(tmp_path / "next")])
    assert done.exit_code == 0, done.output
    before, after = (shardkeep.load(folder).rows("user", ROWS["user"]) for folder in (run, tmp_path / "next"))
    assert 0 < np.abs(before - after).max() < 0.5
    assert (before == after).all(axis=1).sum() > 20 or precision == "int8"
