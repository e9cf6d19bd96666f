"""Jobs with `data.weight`: every figure about quality counts a row by its weight, and the model knows the column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.base.errors import DataError
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.run.reader import RunReader
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv

Row = dict[str, str]


def rows_of(count: int = 240, seed: int = 7) -> list[Row]:
    """Rows whose 0s weigh much more than their 1s."""
    random = np.random.default_rng(seed)
    rows = click_rows(count, seed=seed)
    return [row | {"w": str(int(random.integers(0, 3)) if row["clicked"] == "1" else 8)} for row in rows]


def file_of(path: Path, rows: list[Row], *left_out: str) -> Path:
    return write_csv(path, rows, tuple(name for name in (*COLUMNS, "w") if name not in left_out))


def job_of(folder: Path, **changes: Any) -> dict[str, Any]:
    job = click_job(file_of(folder / "train.csv", rows_of()))
    job["data"] |= {"eval": str(file_of(folder / "eval.csv", rows_of(200, 8))), "split": None, "weight": "w"}
    return {**job, **{key: {**job.get(key, {}), **value} for key, value in changes.items()}}


def train(job: dict[str, Any], run: Path) -> dict[str, Any]:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True).to_dict()


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def as_computed(scored: Path) -> dict[str, float]:
    table = pacsv.read_csv(scored)
    p, y, w = (table[name].to_numpy().astype(np.float64) for name in ("score", "clicked", "w"))
    losses = -np.where(y == 1, np.log(p), np.log(1 - p))
    return {"logloss": (w * losses).sum() / w.sum(), "calibration": (w * p).sum() / (w * y).sum(), "weights": w.sum()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, a run of them that has rows of training to test on, and its export `out`."""
    folder = tmp_path_factory.mktemp("weighted")
    unread = {"data": {"test": str(file_of(folder / "test.csv", rows_of()))}, "eval": {"test": False}}
    train(job_of(folder, **unread, train={"epochs": 2}), folder / "run")
    return folder


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    export_run(folder / "run", folder / "out")
    return folder / "out"


def test_training_and_every_way_to_evaluate_give_the_weighted_figures(folder: Path) -> None:
    run, summary = folder / "run", RunReader(folder / "run").summary() or {}
    for name, count in (("eval", 200), ("test", 240)):
        file = folder / f"{name}.csv"
        predict_files(run, [file], folder / "scores.csv", keep=["clicked", "w"])
        own, expected = evaluate_run(run, split=name), as_computed(folder / "scores.csv")  # type: ignore[arg-type]
        assert {key: own[key] for key in expected} == pytest.approx(expected, rel=1e-5) and own["samples"] == count
        assert evaluate_run(run, files=[file]) == own
    assert evaluate_run(run) == {"step": summary["steps"]} | summary["eval"]
    again, of_file = evaluate_run(run, split="train"), evaluate_run(run, files=[folder / "train.csv"])
    assert again.pop("note").startswith("the model was trained on these rows")
    assert of_file.pop("note").startswith("the model was trained on rows of train.csv") and again == of_file


def test_weights_are_as_rows_that_come_so_often_and_groups_are_weighted(folder: Path, out: Path) -> None:
    often = [row | {"w": "1"} for row in rows_of(200, 8) for _ in range(int(row["w"]))]
    repeated = evaluate_run(out, files=[file_of(folder / "often.csv", often)])
    found = evaluate_run(out, files=[folder / "eval.csv"], by="item")
    groups = found.pop("by")["groups"]
    weighted = numbers(found) | {"samples": len(often)}
    assert weighted.pop("unweighted_calibration") and numbers(repeated) == pytest.approx(weighted, rel=1e-6)
    assert sum(group["weights"] for group in groups) == found["weights"]
    one = [row for row in rows_of(200, 8) if row["item"] == groups[0]["value"]]
    alone = evaluate_run(out, files=[file_of(folder / "one.csv", one)])
    assert numbers(groups[0]) | {"step": alone["step"]} == pytest.approx(numbers(alone))


def test_files_without_the_weight_are_evaluated_by_rows_of_weight_one_and_say_so(folder: Path, out: Path) -> None:
    lighter = file_of(folder / "lighter.csv", rows_of(200, 8), "w")
    ones = file_of(folder / "ones.csv", [row | {"w": "1"} for row in rows_of(200, 8)])
    pq.write_table(pacsv.read_csv(lighter), folder / "lighter.parquet")
    expected = evaluate_run(out, files=[ones])
    with_weights = evaluate_run(out, files=[folder / "eval.csv"])
    assert with_weights["unweighted_calibration"] == pytest.approx(expected["calibration"])
    assert abs(expected["calibration"] / with_weights["calibration"] - 1) > 0.1
    for file in (lighter, folder / "lighter.parquet"):
        found = evaluate_run(out, files=[file])
        assert "no file has the column of weights, w (data.weight)" in found.pop("note")
        assert expected == found | {"weights": 200.0} and "note" not in expected
    assert "note" in evaluate_run(out, files=[lighter, lighter])
    with pytest.raises(DataError, match=r"lighter.csv: has no column w, which other files have; .*\(data.weight\)"):
        evaluate_run(out, files=[folder / "eval.csv", lighter])


def test_files_without_the_weight_are_scored_and_those_without_the_label_only_that(folder: Path, out: Path) -> None:
    assert "w" not in shardkeep.load(out).columns
    with pytest.raises(DataError, match=r"bare.csv: has no column clicked; it has: [a-z, ]*$"):
        evaluate_run(out, files=[file_of(folder / "bare.csv", rows_of(9), "clicked")])
    scores = []
    for left_out in ((), ("w",), ("w", "clicked")):
        predict_files(out, [file_of(folder / "some.csv", rows_of(200, 8), *left_out)], folder / "s.csv")
        scores.append((folder / "s.csv").read_bytes())
    assert scores[0] == scores[1] == scores[2]


def test_an_export_keeps_the_weight_and_its_cost_is_of_metrics_alone(folder: Path) -> None:
    manifest = export_run(folder / "run", folder / "small", formats=Formats(rows="fp16"))
    assert manifest.metrics["weights"] == evaluate_run(folder / "run")["weights"]
    metrics = {"auc", "logloss", "normalized_entropy", "calibration", "unweighted_calibration"}
    assert set(manifest.cost or {}) == metrics
    found = evaluate_run(folder / "small", files=[folder / "eval.csv"])
    assert numbers(found) == pytest.approx(numbers(evaluate_run(folder / "run")), rel=1e-2)


def test_a_weight_that_is_an_input_too_is_needed_to_predict(tmp_path: Path) -> None:
    job = job_of(tmp_path, data={"dense": ["price", "w"]})
    train(job, tmp_path / "run")
    assert "w" in shardkeep.load(tmp_path / "run").columns
    with pytest.raises(DataError, match="has no column w"):
        predict_files(tmp_path / "run", [file_of(tmp_path / "lighter.csv", rows_of(9), "w")], tmp_path / "s.csv")


def test_files_without_a_header_may_leave_out_the_label_and_the_weight(tmp_path: Path) -> None:
    job = job_of(tmp_path, data={"columns": [*COLUMNS, "w"]})
    for path in tmp_path.glob("*.csv"):
        path.write_text(path.read_text().partition("\n")[2])
    train(job, tmp_path / "run")
    scores = []
    for left_out in ((), ("clicked",), ("clicked", "w")):
        file = file_of(tmp_path / "some.csv", rows_of(200, 8), *left_out)
        file.write_text(file.read_text().partition("\n")[2])
        predict_files(tmp_path / "run", [file], tmp_path / "s.csv")
        scores.append((tmp_path / "s.csv").read_bytes())
    assert scores[0] == scores[1] == scores[2]
    file = file_of(tmp_path / "some.csv", rows_of(200, 8), "w")
    file.write_text(file.read_text().partition("\n")[2])
    assert "weights" not in evaluate_run(tmp_path / "run", files=[file])


def test_samples_are_scored_by_weight_before_training_on_them(tmp_path: Path) -> None:
    rows = [row | {"w": str(i % 2)} for i, row in enumerate(rows_of(64))]
    found = []
    for name, held in (("halves", rows), ("half", rows[1::2])):
        job = job_of(
            tmp_path, train={"order": "time", "batch_size": 64}, data={"dense": []}, model={"bottom": [512, 256]}
        )
        file_of(tmp_path / "train.csv", held)
        found.append(train(job, tmp_path / name)["progressive"])
    assert found[0] == pytest.approx(found[1] | {"samples": 64})
