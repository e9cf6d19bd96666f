"""A run whose evaluation and test rows are held out of one file by `data.split`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv

ROWS = 200
HELD = ROWS // 10
UNREAD = {"test": False}


def job_of(folder: Path, by: str = "time", **changes: Any) -> dict[str, Any]:
    file = folder / "clicks.csv"
    if not file.exists():
        rows = [row | {"hour": str(n // 2), "row": str(n)} for n, row in enumerate(click_rows(ROWS))]
        write_csv(file, rows, (*COLUMNS, "hour", "row"))
    job = click_job(file) | changes
    del job["data"]["eval_fraction"]
    job["data"] |= {"split": {"by": by}, "time": "hour"} if by == "time" else {"split": {"by": by}}
    return job


def train(job: dict[str, Any], run: Path) -> shardkeep.callbacks.Summary:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True)


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
    if by == "time":
        assert sides["eval"] == list(range(ROWS - 2 * HELD, ROWS - HELD))
        assert sides["test"] == list(range(ROWS - HELD, ROWS))
    trained = evaluate_run(run, split="train")
    assert trained["samples"] == len(sides["train"])
    assert trained["note"].startswith("the model was trained on these rows")


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


def test_without_eval_test_the_test_rows_stay_unread_until_somebody_asks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = train(job_of(tmp_path, eval=UNREAD), run)
    assert summary.test is None and "test" not in summary.to_dict()
    assert evaluate_run(run, split="test")["samples"] == HELD
    without = train(job_of(tmp_path, eval=UNREAD, checkpoint={"every_steps": "off"}), tmp_path / "without")
    assert without.state_digest == summary.state_digest


def test_a_run_of_eval_fraction_predicts_its_sides(tmp_path: Path) -> None:
    job = job_of(tmp_path, "user")
    del job["data"]["split"]
    job["data"]["eval_fraction"] = 0.2
    summary = train(job, tmp_path / "run")
    held, trained = (predicted(tmp_path / "run", side, tmp_path / f"{side}.csv") for side in ("eval", "train"))
    assert summary.eval is not None and len(held) == summary.eval.samples
    assert sorted(held + trained) == list(range(ROWS))
    with pytest.raises(UserError, match=r"--split test: the job has no files of such rows; allowed: --data"):
        predicted(tmp_path / "run", "test", tmp_path / "test.csv")


def test_files_of_their_own_are_predicted_by_their_role(tmp_path: Path) -> None:
    job = job_of(tmp_path, "user")
    del job["data"]["split"]
    job["data"]["eval"] = str(write_csv(tmp_path / "later.csv", click_rows(90, seed=8)))
    train(job, tmp_path / "run")
    assert len(predicted(tmp_path / "run", "eval", tmp_path / "eval.csv", "item")) == 90
    assert len(predicted(tmp_path / "run", "train", tmp_path / "train.csv", "item")) == ROWS


def test_an_order_of_time_takes_several_epochs_and_scores_the_first_before_training(tmp_path: Path) -> None:
    order = {"batch_size": 32, "order": "time"}
    one = train(job_of(tmp_path, train=order, eval=UNREAD), tmp_path / "one").to_dict()
    two = train(job_of(tmp_path, train=order | {"epochs": 2}, eval=UNREAD), tmp_path / "two").to_dict()
    assert two["steps"] == 2 * one["steps"] and two["progressive"] == one["progressive"]
    assert two["progressive"]["samples"] == ROWS - 2 * HELD
    options = ["train", "--resume", str(tmp_path / "one"), "--set", "train.epochs=2"]
    more = CliRunner().invoke(app, options)
    assert more.exit_code == 0, more.output
    assert (RunReader(tmp_path / "one").summary() or {})["state_digest"] == two["state_digest"]


def test_a_split_may_not_change_when_a_job_continues(tmp_path: Path) -> None:
    train(job_of(tmp_path, "user", eval=UNREAD, train={"batch_size": 32, "max_steps": 2}), tmp_path / "run")
    options = ["--resume", str(tmp_path / "run"), "--set", "train.max_steps=4"]
    refused = CliRunner().invoke(app, ["train", *options, "--set", "data.split.test=0.2"])
    assert refused.exit_code == 2 and "--set data.split.test: may not change" in refused.output
    assert CliRunner().invoke(app, ["train", *options]).exit_code == 0
    (tmp_path / "clicks.csv").write_text((tmp_path / "clicks.csv").read_text().replace("u1,", "u200,"))
    changed = CliRunner().invoke(app, ["train", *options[:3], "train.max_steps=6"])
    assert changed.exit_code == 2 and "the training data are not those of" in changed.output


def test_the_launcher_tells_shares_that_are_not_those_named(tmp_path: Path) -> None:
    rows = [row | {"user": "u7" if n % 8 else f"v{n}"} for n, row in enumerate(click_rows(2 * ROWS))]
    write_csv(tmp_path / "clicks.csv", [row | {"hour": "1", "row": "1"} for row in rows], (*COLUMNS, "hour", "row"))
    job = job_of(tmp_path, "user", eval=UNREAD, train={"batch_size": 32, "max_steps": 1})
    (tmp_path / "job.yaml").write_text(write_yaml(job))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 0 and done.output.count("data.split by user: evaluation has ") == 1, done.output


def test_predict_takes_files_or_a_side(tmp_path: Path) -> None:
    for options in ([], ["--data", "a.csv", "--split", "test"]):
        done = CliRunner().invoke(app, ["predict", str(tmp_path), "--out", "b.csv", *options])
        assert done.exit_code == 2 and "needs --data FILE or --split, one of them" in done.output
