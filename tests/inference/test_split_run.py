"""Runs whose rows are split by `data.split` or taken by time: each side is scored, and by `train.order: time` each
sample before the model trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.run.reader import RunReader
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.metrics.binned import BinnedScores
from tests.support.cases import every
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv
from tests.support.records import records_in

ROWS, BATCH = 200, 32
HELD = ROWS // 10
NAMES = (*COLUMNS, "hour", "row")
UNREAD = {"test": False}


def job_of(folder: Path, by: str | None = "time", train: Any = None, data: Any = None, **changes: Any) -> Any:
    """A job over a split by a column, or over all rows of a file by time."""
    file = folder / "clicks.csv"
    if not file.exists():
        write_csv(file, [row | {"hour": str(n // 2), "row": str(n)} for n, row in enumerate(click_rows(ROWS))], NAMES)
    job = click_job(file) | changes
    job["data"] |= {"split": None} | (data or {})
    job["train"] = {"batch_size": BATCH, "order": "time" if by is None else "shuffled"} | (train or {})
    if by is not None:
        job["data"] |= {"split": {"by": by}, **({"time": "hour"} if by == "time" else {})}
    return job


def train(job: dict[str, Any], run: Path) -> shardkeep.callbacks.Summary:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True)


def resumed(run: Path, setting: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["train", "--resume", str(run), "--set", setting])
    assert done.exit_code == 0, done.output
    return (RunReader(run).summary() or {}) | {"printed": done.output}


def predicted(run: Path, side: Any, out: Path, keep: str = "row") -> list[Any]:
    predict_files(run, side, out, keep=[keep])
    found: list[Any] = pacsv.read_csv(out)[keep].to_pylist()
    return found


@every("by", ["time", "user", "random"])
def test_each_side_can_be_evaluated_and_predicted(tmp_path: Path, by: str) -> None:
    run, tested = tmp_path / "run", by == "random"
    summary = train(job_of(tmp_path, by, eval={"test": tested}), run)
    sides = {side: predicted(run, side, tmp_path / f"{side}.csv") for side in ("train", "eval", "test")}
    assert sorted(row for rows in sides.values() for row in rows) == list(range(ROWS))
    assert summary.eval is not None and len(sides["eval"]) == summary.eval.samples
    of_test = evaluate_run(run, split="test")
    assert len(sides["test"]) == of_test["samples"]
    assert summary.to_dict().get("test") == (of_test if tested else None)  # scored once, after training
    trained = evaluate_run(run, split="train")
    assert trained["samples"] == len(sides["train"])
    assert trained["note"].startswith("the model was trained on these rows")
    if by == "time":
        assert sides["eval"] == list(range(ROWS - 2 * HELD, ROWS - HELD))
        assert sides["test"] == list(range(ROWS - HELD, ROWS))
        off = train(job_of(tmp_path, by, eval=UNREAD, checkpoint={"every_steps": "off"}), tmp_path / "off")
        assert off.state_digest == summary.state_digest


HOURS = {
    "older rows are added": -9,
    "newer rows are added": 900,
    "training rows come again": 5,
    "in another order": None,
}


def test_rows_of_training_never_become_test_rows_when_the_file_changes(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "clicks.csv"
    train(job_of(tmp_path, eval=UNREAD), run)
    before = {side: evaluate_run(run, split=side) for side in ("eval", "test")}
    head, *lines = file.read_text().splitlines()
    for change, hour in HOURS.items():
        more = lines[: 49 * (hour is not None)]
        added = [f"{line.rsplit(',', 2)[0]},{hour},{n + ROWS}" for n, line in enumerate(more)]
        file.write_text("\n".join([head, *(lines + added)[::-1]]) + "\n")
        of_test = HELD + (len(added) if "newer" in change else 0)
        found = evaluate_run(run, split="test")
        assert len(predicted(run, "test", tmp_path / "test.csv")) == found["samples"] == of_test, change
        assert evaluate_run(run)["logloss"] == pytest.approx(before["eval"]["logloss"], rel=1e-5), change
        if "newer" not in change:
            assert found["logloss"] == pytest.approx(before["test"]["logloss"], rel=1e-5), change


def test_rows_held_out_and_files_of_their_own_are_predicted_by_their_role(tmp_path: Path) -> None:
    run, later = tmp_path / "run", write_csv(tmp_path / "later.csv", click_rows(90, seed=8))
    summary = train(
        job_of(tmp_path, None, data={"split": {"by": "random", "eval": 0.2, "test": 0.0}}, train={"order": "shuffled"}),
        run,
    )
    held, trained = (predicted(run, side, tmp_path / f"{side}.csv") for side in ("eval", "train"))
    assert summary.eval is not None and len(held) == summary.eval.samples
    assert sorted(held + trained) == list(range(ROWS))
    with pytest.raises(UserError, match=r"--split test: the job has no files of such rows; allowed: --data"):
        predicted(run, "test", tmp_path / "test.csv")
    parts: dict[str, Any] = {"eval": str(later), "split": {"by": "user", "eval": 0.0, "test": 0.2}}
    tested = train(job_of(tmp_path, None, data=parts), tmp_path / "files").test
    assert tested is not None
    for side, count in (("eval", 90), ("test", tested.samples), ("train", ROWS - tested.samples)):
        assert len(predicted(tmp_path / "files", side, tmp_path / f"{side}.csv", "item")) == count


def test_an_order_of_time_takes_several_epochs_and_scores_the_first_before_training(tmp_path: Path) -> None:
    one = train(job_of(tmp_path, train={"order": "time"}, eval=UNREAD), tmp_path / "one").to_dict()
    two = train(job_of(tmp_path, train={"order": "time", "epochs": 2}, eval=UNREAD), tmp_path / "two").to_dict()
    assert two["steps"] == 2 * one["steps"] and two["progressive"] == one["progressive"]
    assert two["progressive"]["samples"] == ROWS - 2 * HELD
    assert resumed(tmp_path / "one", "train.epochs=2")["state_digest"] == two["state_digest"]


def test_a_split_may_not_change_when_a_job_continues(tmp_path: Path) -> None:
    train(job_of(tmp_path, "user", eval=UNREAD, train={"max_steps": 2}), tmp_path / "run")
    refused = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run"), "--set", "data.split.test=0.2"])
    assert refused.exit_code == 2 and "--set data.split.test=0.2 in place of 0.1: may not change" in refused.output


def test_predict_takes_files_or_a_side(tmp_path: Path) -> None:
    for options in ([], ["--data", "a.csv", "--split", "test"]):
        done = CliRunner().invoke(app, ["predict", str(tmp_path), "--out", "b.csv", *options])
        assert done.exit_code == 2 and "needs --data FILE or --split, one of them" in done.output


# ---- each sample is scored before the model trains on it ----


def test_each_step_is_scored_by_the_model_that_it_begins_with(tmp_path: Path) -> None:
    norm = {"model": {"norm": "batch"}}
    done = train(job_of(tmp_path, None, eval={"every_steps": 1}, **norm), tmp_path / "run")
    found = [each for each in records_in(tmp_path / "run" / "metrics.jsonl") if each.get("phase") == "progressive"]
    assert [record["step"] for record in found] == list(range(1, done.steps + 1))
    assert [record["samples"] for record in found] == [BATCH] * 6 + [8]
    for step in (2, 5):
        train(job_of(tmp_path, None, train={"max_steps": step}, **norm), tmp_path / f"to-{step}")
        rows = click_rows(ROWS)[step * BATCH : (step + 1) * BATCH]
        expected = evaluate_run(tmp_path / f"to-{step}", files=[write_csv(tmp_path / f"part-{step}.csv", rows)])
        assert found[step]["auc"] == pytest.approx(expected["auc"], abs=0.02)  # of few samples and close logits
        for metric in ("logloss", "normalized_entropy", "calibration"):
            assert found[step][metric] == pytest.approx(expected[metric], rel=1e-6)
    progressive = done.to_dict()["progressive"]
    losses = [record["logloss"] * record["samples"] for record in found]
    assert progressive["samples"] == ROWS and progressive["logloss"] == pytest.approx(sum(losses) / ROWS)


def test_scoring_changes_no_bit_of_the_model(tmp_path: Path) -> None:
    model = {"norm": "batch", "dropout": 0.2}
    scored = train(job_of(tmp_path, None, model=model), tmp_path / "scored")
    plain = train(job_of(tmp_path, None, model=model, train={"order": "stored"}), tmp_path / "plain")
    assert scored.state_digest == plain.state_digest
    assert "progressive" in scored.to_dict() and "progressive" not in plain.to_dict()


def test_a_resumed_job_counts_every_sample_once(tmp_path: Path) -> None:
    steps = {"eval": {"every_steps": 4}}
    whole = train(job_of(tmp_path, None, **steps), tmp_path / "whole").to_dict()
    train(job_of(tmp_path, None, **steps, train={"max_steps": 3}), tmp_path / "run")
    more = resumed(tmp_path / "run", "train.max_steps=7")
    assert (more["state_digest"], more["progressive"]) == (whole["state_digest"], whole["progressive"])
    assert "progressive" in more["printed"]
    assert f"on {ROWS - 4 * BATCH} samples before training on them" in more["printed"]


def test_scores_that_are_not_finite_leave_metrics_undefined() -> None:
    scores = BinnedScores(["click"], numbers=False)
    scores.add(np.array([[1.0], [np.nan]], np.float32), np.array([[1.0], [0.0]], np.float32))
    found = scores.close(Solo())
    assert found["samples"] == 2 and found["auc"] is None and found["logloss"] is None
    assert found["note"] == "1 of 2 predictions are not finite"
    assert scores.close(Solo())["samples"] == 0 and scores.total(Solo())["samples"] == 2
