"""Jobs whose labels are numbers, and metrics by choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError, DataError, UserError
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run, predict_files
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.records import records_in


def file_of(folder: Path, label: Callable[[dict[str, str]], float], count: int = 200) -> Path:
    """Rows whose label `clicked` is a number."""
    return write_csv(folder / "numbers.csv", [row | {"clicked": f"{label(row):.4f}"} for row in click_rows(count)])


def ratings(folder: Path) -> Path:
    """Numbers from -2 to 2, which follow the user."""
    random = np.random.default_rng(2)
    return file_of(folder, lambda row: int(row["user"][1:]) % 5 - 2 + random.normal(0, 0.1))


PLAYS = 27_000.0


def plays(folder: Path) -> Path:
    """Numbers of milliseconds, whose mean is about `PLAYS`."""
    random = np.random.default_rng(3)
    return file_of(folder, lambda _: PLAYS + 9_000 * random.normal())


def column(path: Path, name: str) -> np.ndarray:
    return pacsv.read_csv(path)[name].to_numpy()


def job_of(file: Path, /, **changes: Any) -> shardkeep.JobConfig:
    job = click_job(file, tables={"default": {"dim": 8, "optimizer": {"name": "adagrad", "lr": 0.1}}})
    job["tower"] |= {"optimizer": {"lr": 0.01}}
    for key, value in changes.items():
        job[key] = {**job.get(key, {}), **value}
    return shardkeep.JobConfig.model_validate(job)


@every("loss", ["mse", {"name": "huber", "delta": 0.5}])
def test_a_job_learns_numbers_and_predicts_them(tmp_path: Path, loss: Any) -> None:
    data = ratings(tmp_path)
    config = job_of(data, train={"loss": loss, "epochs": 8, "batch_size": 16})
    assert config.data.label is not None and config.data.label.kind == "number"
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    assert summary.eval is not None and summary.eval.auc is None
    assert summary.eval.mse is not None and summary.eval.mse < 1.0 < np.var([-2, -1, 0, 1, 2])
    assert summary.eval.rmse == pytest.approx(summary.eval.mse**0.5)
    found = evaluate_run(tmp_path / "run")
    errors = ("mse", "rmse", "mae")
    keys = (*errors, "r2", "samples", "unseen", *(f"baseline_{name}" for name in errors))
    assert found == {"step": summary.steps} | {key: summary.to_dict()["eval"][key] for key in keys}
    assert 0.0 < found["r2"] < 1.0 and found["mse"] < found["baseline_mse"]
    records = records_in(tmp_path / "run" / "metrics.jsonl")
    assert not any("worse than a constant" in str(record.get("text")) for record in records)
    predict_files(tmp_path / "run", [data], tmp_path / "scores.csv")
    scores, labels = column(tmp_path / "scores.csv", "score"), column(data, "clicked")
    assert scores.min() < -0.5 and scores.max() > 1.0
    whole = evaluate_run(tmp_path / "run", files=[data])
    assert np.mean((scores - labels) ** 2) == pytest.approx(whole["mse"], rel=1e-4)


@every("model", ["dnn", "lr", "finalmlp"])
def test_a_stock_model_of_numbers_begins_at_the_mean_of_the_training_labels(tmp_path: Path, model: str) -> None:
    """So that it is no worse than that constant from the first step on."""
    file = plays(tmp_path)
    train = {"loss": "mse", "max_steps": 1, "batch_size": 32}
    config = shardkeep.JobConfig.model_validate(click_job(file, model=model, tables={}) | {"train": train})
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    scores = summary.to_dict()["eval"]
    assert scores["rmse"] == pytest.approx(scores["baseline_rmse"], rel=0.02)
    predict_files(tmp_path / "run", [file], tmp_path / "scores.csv")
    assert column(tmp_path / "scores.csv", "score").mean() == pytest.approx(PLAYS, rel=0.05)


def test_a_model_that_loses_to_the_constant_mean_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job_of(plays(tmp_path), train={"loss": "mse", "epochs": 1}, tower={"optimizer": {"lr": 1e6}})
    summary = shardkeep.train(config, run_dir=tmp_path / "run")
    scores = summary.to_dict()["eval"]
    assert scores["mse"] > scores["baseline_mse"] and scores["r2"] < 0
    printed = capsys.readouterr().out
    assert "warning: the model is worse than a constant, the mean of the training labels" in printed
    assert f"(constant mean {scores['baseline_rmse']:.4f})" in printed


def test_what_a_model_began_with_is_kept_on_resume_and_by_a_model_that_begins_with_it(tmp_path: Path) -> None:
    """The bias is in the checkpoint: other data, with another mean, do not set it again."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir(), other.mkdir()
    settings: dict[str, Any] = {"train": {"loss": "mse", "max_steps": 1}}
    shardkeep.train(job_of(plays(first), **settings), run_dir=tmp_path / "run", quiet=True)
    begun = bias_of(tmp_path / "run")
    assert begun == pytest.approx(PLAYS, rel=0.05)
    of_others = job_of(ratings(other), **settings)
    shardkeep.train(of_others, run_dir=tmp_path / "next", from_run=tmp_path / "run", quiet=True)
    shardkeep.resume(tmp_path / "run", overrides=["train.max_steps=2"], quiet=True)
    assert bias_of(tmp_path / "next") == pytest.approx(begun, abs=1.0)
    assert bias_of(tmp_path / "run") == pytest.approx(begun, abs=1.0)


def bias_of(run: Path) -> float:
    newest = max((run / "checkpoints").glob("step-*"))
    return float(load_file(newest / "tower" / "tower.safetensors")["/model/logit.bias"])


def test_weights_of_one_change_no_bit_and_others_do(tmp_path: Path) -> None:
    lines = write_csv(tmp_path / "clicks.csv", click_rows(60)).read_text().splitlines()
    digests = []
    for name, weight in (("none", None), ("ones", 1.0), ("halves", 0.5)):
        file = tmp_path / f"{name}.csv"
        file.write_text("\n".join([f"{lines[0]},w", *(f"{line},{weight or 1.0}" for line in lines[1:])]) + "\n")
        config = job_of(file, data={"weight": None if weight is None else "w", "split": None})
        digests.append(shardkeep.train(config, run_dir=tmp_path / name, quiet=True).state_digest)
    assert digests[0] == digests[1] != digests[2]


def test_the_metrics_that_a_job_asks_for_are_those_of_evaluate_and_files_are_scored_whole(tmp_path: Path) -> None:
    """Labels of 0 and 1 have no constant beside them. The job's own evaluation is limited to some samples."""
    data = write_csv(tmp_path / "clicks.csv", click_rows(300))
    names = ["gauc", "auc", "accuracy", "precision", "recall", "mse", "r2", "calibration_buckets"]
    config = job_of(data, eval={"metrics": names, "group_by": "user", "threshold": 0.3, "max_samples": 30})
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    told = summary.to_dict()["eval"]
    assert set(told) == {*names, "samples", "unseen"} and told["samples"] == 30
    assert evaluate_run(tmp_path / "run") == {"step": summary.steps} | told
    assert sum(bucket["samples"] for bucket in told["calibration_buckets"]) == 30
    found = evaluate_run(tmp_path / "run", files=[data], by="item")
    assert sum(group["samples"] for group in found["by"]["groups"]) == found["samples"] == 300


def test_groups_need_a_column_with_one_value_in_a_row(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "clicks.csv", click_rows(100))
    for column, why in (("tags", "has several values in a row"), ("price", "is no feature of the data")):
        config = job_of(data, eval={"metrics": ["gauc"], "group_by": column})
        with pytest.raises(ConfigError, match=f"eval.group_by: {column} {why}"):
            shardkeep.train(config, run_dir=tmp_path / column, quiet=True)


def test_metrics_of_each_value_of_a_column(clicks: Path, exported: Path, tmp_path: Path) -> None:
    rows = click_rows(600)
    for row in rows[:50]:
        row["item"] = ""
    new = write_csv(tmp_path / "new.csv", rows)
    found = evaluate_run(exported, files=[new], by="item")
    groups = found["by"]["groups"]
    assert sum(group["samples"] for group in groups) == 600 == found["samples"]
    assert [group["samples"] for group in groups] == sorted((g["samples"] for g in groups), reverse=True)
    value = groups[1]["value"]
    own = write_csv(tmp_path / "own.csv", [row for row in rows if row["item"] == value])
    alone = evaluate_run(exported, files=[own])
    assert {"value": value} | alone == {"step": found["step"], "unseen": alone["unseen"]} | groups[1]
    command = ["evaluate", str(exported), "--data", str(new), "--by", "item"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0 and "the 20 most frequent of 51 values; --json has all" in shown.output
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout) == found
    refused = CliRunner().invoke(app, ["evaluate", str(clicks), "--by", "item"])
    assert refused.exit_code == 2 and "--by item: needs files" in refused.output
    columns = {"clicked": [1, 0], "user": ["u1", "u2"], "item": [1, 2], "tags": [["t1"], []]}
    pq.write_table(pa.table(columns | {"price": [1.0, 2.0], "age": [20, 30]}), tmp_path / "lists.parquet")
    with pytest.raises(UserError, match=r"column tags: holds list<.*>; allowed: for --by a column with one value a"):
        evaluate_run(exported, files=[tmp_path / "lists.parquet"], by="tags")
    with pytest.raises(DataError, match="no column city"):
        evaluate_run(exported, files=[new], by="city")
