"""`train.order: time`: one pass by time, each sample scored before the model trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run
from shardkeep.run.reader import RunReader
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_predictions
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.records import records_in

ROWS, BATCH = 200, 32
Job = dict[str, Any]


def job_of(folder: Path, *, order: str = "time", rows: list[dict[str, str]] | None = None, **changes: Any) -> Job:
    file = folder / "clicks.csv"
    if not file.exists() or rows is not None:
        write_csv(file, rows or click_rows(ROWS))
    job = click_job(file)
    for key, value in ({"train": {"order": order}, "data": {"eval_fraction": 0.0}} | changes).items():
        job[key] = {**job.get(key, {}), **value} if isinstance(value, dict) else value
    job["train"] = {"batch_size": BATCH, "order": order, **changes.get("train", {})}
    job["data"]["eval_fraction"] = 0.0
    return job


def train(job: Job, run: Path) -> shardkeep.callbacks.Summary:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True)


def reports(run: Path) -> list[dict[str, Any]]:
    return [record for record in records_in(run / "metrics.jsonl") if record.get("phase") == "progressive"]


def test_each_step_is_scored_by_the_model_that_it_begins_with(tmp_path: Path) -> None:
    done = train(job_of(tmp_path, eval={"every_steps": 1}, model={"norm": "batch"}), tmp_path / "run")
    found = reports(tmp_path / "run")
    assert [record["step"] for record in found] == list(range(1, done.steps + 1))
    assert [record["samples"] for record in found] == [32] * 6 + [8]
    for step in (2, 5):
        train(job_of(tmp_path, train={"max_steps": step}, model={"norm": "batch"}), tmp_path / f"to-{step}")
        rows = click_rows(ROWS)[step * BATCH : (step + 1) * BATCH]
        expected = evaluate_run(tmp_path / f"to-{step}", files=[write_csv(tmp_path / f"part-{step}.csv", rows)])
        assert found[step]["auc"] == pytest.approx(
            expected["auc"], abs=0.02
        )  # few samples, logits still close together
        for metric in ("logloss", "normalized_entropy", "calibration"):
            assert found[step][metric] == pytest.approx(expected[metric], rel=1e-6)
    progressive = done.to_dict()["progressive"]
    assert progressive["samples"] == ROWS
    losses = [record["logloss"] * record["samples"] for record in found]
    assert progressive["logloss"] == pytest.approx(sum(losses) / ROWS)


def test_scoring_changes_no_bit_of_the_model(tmp_path: Path) -> None:
    model = {"norm": "batch", "dropout": 0.2}
    scored = train(job_of(tmp_path, model=model), tmp_path / "scored")
    plain = train(job_of(tmp_path, order="stored", model=model), tmp_path / "plain")
    assert scored.state_digest == plain.state_digest
    assert "progressive" in scored.to_dict() and "progressive" not in plain.to_dict()


def test_a_column_of_times_gives_the_order_of_training(tmp_path: Path) -> None:
    rows = click_rows(ROWS)
    sorted_ = train(job_of(tmp_path, rows=rows), tmp_path / "sorted")
    order = np.random.default_rng(0).permutation(ROWS)
    (tmp_path / "mixed").mkdir()
    file = tmp_path / "mixed" / "clicks.csv"
    names = ("clicked", "user", "item", "tags", "price", "age", "hour")
    write_csv(file, [rows[i] | {"hour": str(i)} for i in order.tolist()], names)
    by_hour = job_of(tmp_path / "mixed", data={"time": "hour"})
    assert by_hour["data"]["train"] == str(file)
    mixed = train(by_hour, tmp_path / "mixed" / "run")
    left_alone = train(job_of(tmp_path / "mixed"), tmp_path / "mixed" / "stored")
    # The sums of the scaling's means run over the files' order, so bits may differ.
    assert mixed.to_dict()["progressive"]["logloss"] == pytest.approx(sorted_.to_dict()["progressive"]["logloss"])
    assert abs(mixed.to_dict()["progressive"]["logloss"] - left_alone.to_dict()["progressive"]["logloss"]) > 1e-5


def test_a_resumed_job_counts_every_sample_once(tmp_path: Path) -> None:
    steps = {"eval": {"every_steps": 4}}
    whole = train(job_of(tmp_path, **steps), tmp_path / "whole")
    train(job_of(tmp_path, **steps, train={"max_steps": 3}), tmp_path / "run")
    more = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run"), "--set", "train.max_steps=7"])
    assert more.exit_code == 0, more.output
    summary = RunReader(tmp_path / "run").summary() or {}
    assert summary["state_digest"] == whole.state_digest
    assert summary["progressive"] == whole.to_dict()["progressive"]
    assert "progressive" in more.output and f"on {ROWS - 4 * BATCH} samples before training on them" in more.output


def test_of_labels_that_are_numbers_it_tells_errors(tmp_path: Path) -> None:
    done = train(job_of(tmp_path, train={"loss": "mse"}), tmp_path / "run").to_dict()["progressive"]
    assert set(done) == {"mse", "rmse", "mae", "samples"} and done["rmse"] ** 2 == pytest.approx(done["mse"])


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, order="stored", data={"time": "age"})
    with pytest.raises((ConfigError, ValueError), match=r"data.time: has no effect with train.order: stored"):
        shardkeep.JobConfig.model_validate(job)


@every("labels", [1, 2])
def test_binned_metrics_are_those_of_all_scores(labels: int) -> None:
    random = np.random.default_rng(5)
    logits = random.normal(-2, 2, (20_000, labels)).astype(np.float32)
    clicks = (random.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    names = ["click", "buy"][:labels]
    scores, other = BinnedScores(names, numbers=False), BinnedScores(names, numbers=False)
    for part in np.array_split(np.arange(20_000), 7):
        (scores if part[0] % 2 else other).add(logits[part], clicks[part])
    scores.load([scores.state().clone(), other.state()])
    found = scores.total(Solo())
    for t, name in enumerate(names):
        exact = evaluate_predictions(logits[:, t], clicks[:, t], None, MetricSettings())
        for metric, value in exact.items():
            key = metric if labels == 1 or metric == "samples" else f"{metric}/{name}"
            assert found[key] == pytest.approx(value, abs=1e-5)


def test_scores_that_are_not_finite_leave_metrics_undefined() -> None:
    scores = BinnedScores(["click"], numbers=False)
    scores.add(np.array([[1.0], [np.nan]], np.float32), np.array([[1.0], [0.0]], np.float32))
    found = scores.close(Solo())
    assert found["samples"] == 2 and found["auc"] is None and found["logloss"] is None
    assert found["note"] == "1 of 2 predictions are not finite"
    assert scores.close(Solo())["samples"] == 0 and scores.total(Solo())["samples"] == 2
