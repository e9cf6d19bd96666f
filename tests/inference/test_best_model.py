"""Early stopping in whole jobs: when they end, which checkpoint is the best, and a job that dies in between."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError, DataError, JobError, ShardkeepError, UserError
from shardkeep.cli.main import app
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.scoring import evaluate_run
from shardkeep.run.next_steps import resume_line
from shardkeep.run.origin.warm_start import plan_warm_start
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.records import records_in

EPOCHS = 12


def job_of(folder: Path, *, test: bool = False, **train: Any) -> dict[str, Any]:
    """Overfits within some epochs: the dense model is too large for its rows."""
    data = folder / "train.csv"
    if not data.exists():
        write_csv(data, click_rows(120))
    job = click_job(data, model={"bottom": [32], "hidden": [32, 32]})
    if test:
        job["data"]["test"] = [str(write_csv(folder / "test.csv", click_rows(60, seed=21)))]
    job["checkpoint"] = {"every_steps": 1000, "keep": 1}
    job["tables"] = {"default": {"dim": 8, "optimizer": {"name": "adagrad", "lr": 0.3}}}
    job["tower"] |= {"optimizer": {"lr": 0.01}}
    job["train"] = {"batch_size": 32, "epochs": EPOCHS, "early_stopping": {"metric": "logloss", "patience": 2}} | train
    return job


def train(job: dict[str, Any], run: Path) -> shardkeep.callbacks.Summary:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True)


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["logloss"]) for r in records_in(run / "metrics.jsonl") if r["kind"] == "eval"]


def summary_of(run: Path) -> shardkeep.callbacks.Summary:
    return shardkeep.callbacks.Summary.model_validate(RunReader(run).summary())


def best_of(run: Path) -> int:
    best = summary_of(run).best
    assert best is not None and best.step is not None
    return best.step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that stopped early, with its files and its `run`."""
    folder = tmp_path_factory.mktemp("stopped")
    train(job_of(folder), folder / "run")
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped / "run", tmp_path / "run")


def test_a_job_ends_two_evaluations_after_its_best_one_keeps_that_model_and_tests_it_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(job_of(tmp_path, test=True), run)
    summary, found = summary_of(run), evaluations(run)
    best_step, best_value = min(found, key=lambda each: each[1])
    assert summary.status == "completed" and len(found) < EPOCHS
    assert [step for step, _ in found][-3] == best_step and summary.steps == found[-1][0]
    assert summary.best is not None and (summary.best.step, summary.best.logloss) == (best_step, best_value)
    assert summary.eval is not None and summary.eval.logloss == found[-1][1] > best_value
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == [f"step-{best_step:08d}", f"step-{summary.steps:08d}"]
    assert evaluate_run(run, which="best") == summary.to_dict()["best"]
    assert summary.test is not None and (summary.test.step, summary.test.samples) == (best_step, 60)
    tested = evaluate_run(run, which="best", files=[tmp_path / "test.csv"])
    assert summary.to_dict()["test"] == tested == evaluate_run(run, which="best", split="test")


def test_whatever_uses_a_job_that_stopped_early_takes_its_best_model_unless_told(stopped: Path, tmp_path: Path) -> None:
    run, best, last = stopped / "run", best_of(stopped / "run"), summary_of(stopped / "run").steps
    command = ["predict", str(run), "--data", str(stopped / "train.csv"), "--out", str(tmp_path / "scores.csv")]
    for options, step in (([], best), (["--model", "last"], last)):
        assert f"by the model of step {step:,} in" in CliRunner().invoke(app, [*command, *options]).stdout
    export_run(run, tmp_path / "export")
    assert shardkeep.load(run).step == shardkeep.load(tmp_path / "export").step == evaluate_run(run)["step"] == best
    assert shardkeep.load(run, "last").step == last
    assert plan_warm_start(shardkeep.JobConfig.model_validate(job_of(stopped)), run).checkpoint.step == best


def damage(folder: Path, kind: str) -> None:
    if kind == "gone":
        shutil.rmtree(folder)
    elif kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "half a manifest":
        (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:99])
    elif kind == "no rows":
        shutil.rmtree(folder / "server-0")
    else:
        file = folder / "tower/tower.safetensors"
        file.write_bytes(file.read_bytes()[:-3] + b"..." * (kind == "other bytes"))


def test_a_best_model_that_is_gone_or_damaged_is_an_error_of_a_line_and_never_another_model(
    run: Path, stopped: Path, tmp_path: Path
) -> None:
    job, kept, step = shardkeep.JobConfig.model_validate(job_of(stopped)), stopped / "run", best_of(run)
    best = run / f"checkpoints/step-{step:08d}"
    predict = ["predict", str(run), "--data", str(stopped / "train.csv"), "--out", str(tmp_path / "scores.csv")]
    commands = [
        ["evaluate", str(run), "--model", "best"],
        ["export", str(run), str(tmp_path / "export")],
        ["serve", str(run), "--listen", "127.0.0.1:0", "--http", "off"],
        ["compare", str(run), str(kept)],
        predict,
    ]
    for kind in ("gone", "no manifest", "half a manifest", "no rows", "cut", "other bytes"):
        damage(best, kind)
        errors = []
        for words in {"gone": commands, "other bytes": [predict]}.get(kind, []):
            done = CliRunner().invoke(app, words)
            assert done.exit_code in (1, 2) and done.stderr.count("\n") == 1, (kind, words, done.output)
            errors.append(done.stderr)
        with pytest.raises(ShardkeepError) as caught:
            shardkeep.load(run)
        for error in (*errors, str(caught.value)):
            assert "last" in error or kind == "other bytes", (kind, error)
            assert step in map(int, re.findall(r"\d+", error)), (kind, error)
        if kind != "other bytes":  # found when they are read
            with pytest.raises(ShardkeepError, match=str(step)):
                plan_warm_start(job, run)
        if kind == "gone":
            assert shardkeep.load(run, "last").step == summary_of(run).steps
        assert not (tmp_path / "export").exists()
        shutil.rmtree(best, ignore_errors=True)
        shutil.copytree(kept / best.relative_to(run), best)
    assert shardkeep.load(run).step == step


def test_before_the_first_evaluation_there_is_no_best_model_and_the_last_one_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(job_of(tmp_path, max_steps=3) | {"checkpoint": {"every_steps": 2, "keep": 20}}, run)
    shutil.rmtree(run / "checkpoints/step-00000003")  # as if it was killed before its evaluation
    assert shardkeep.load(run).step == 2
    with pytest.raises(UserError, match=r"^--model best: no evaluation has found the best one; allowed: last, 2$"):
        shardkeep.load(run, "best")


def test_a_job_that_is_resumed_in_the_middle_of_its_patience_ends_where_it_would_have(
    stopped: Path, tmp_path: Path
) -> None:
    whole, between = summary_of(stopped / "run"), evaluations(stopped / "run")[-2][0]
    train(job_of(stopped, max_steps=between), tmp_path / "cut")
    shardkeep.resume(tmp_path / "cut", overrides=[f"train.max_steps={whole.steps + 500}"], quiet=True)
    summary = summary_of(tmp_path / "cut")
    assert (summary.steps, summary.best, summary.state_digest) == (whole.steps, whole.best, whole.state_digest)


def test_a_job_that_stopped_early_says_so_on_resume_and_trains_on_with_more_patience(run: Path) -> None:
    before = summary_of(run)
    text = (
        f"--resume {run}: training stopped early at step {before.steps}: logloss has not improved in 2 evaluations "
        f"since step {best_of(run)}; to train longer, --set train.early_stopping.patience=4"
    )
    for overrides in ([], ["--set", "train.epochs=50"]):
        again = CliRunner().invoke(app, ["train", "--resume", str(run), *overrides])
        assert (again.exit_code, again.stderr) == (2, f"error: {text}\n")
    assert summary_of(run) == before
    longer = shardkeep.resume(run, overrides=["train.early_stopping.patience=3"], quiet=True)
    assert longer.steps > before.steps and longer.best == before.best
    assert len(evaluations(run)) == len({step for step, _ in evaluations(run)})


def test_a_resume_without_a_step_left_keeps_the_metrics_and_shows_no_times(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = summary_of(run)
    (run / "summary.json").unlink()  # killed after its last checkpoint
    shardkeep.resume(run)
    after = summary_of(run)
    assert after.eval is not None and (after.eval, after.best, after.steps) == (before.eval, before.best, before.steps)
    assert "mean step" not in capsys.readouterr().out


def test_without_early_stopping_there_is_no_best(clicks: Path) -> None:
    assert summary_of(clicks).best is None and "best" not in summary_of(clicks).to_dict()
    with pytest.raises(UserError, match=r"--model best: the job has no train.early_stopping"):
        shardkeep.load(clicks, "best")


@pytest.mark.slow
def test_test_data_that_cannot_be_scored_leave_the_model_and_are_an_error(tmp_path: Path) -> None:
    job, run = job_of(tmp_path, test=True, early_stopping=None, epochs=1), tmp_path / "run"
    write_csv(tmp_path / "test.csv", [row | {"price": "cheap"} for row in click_rows(3)])
    with pytest.raises(
        JobError, match=r"the model is trained, but data.test is not scored: .*test.csv, row 1, column price"
    ):
        train(job, run)
    summary = summary_of(run)
    assert summary.status == "incomplete" and summary.test is None
    step = shardkeep.load(run).step
    assert summary.steps == step and resume_line(run) == f"nothing to resume: step-{step:08d} has all steps"
    with pytest.raises(UserError, match=f"the job is done at step {step}"):
        shardkeep.resume(run, quiet=True)


@pytest.mark.chaos
def test_test_data_are_scored_in_a_folder_that_holds_another_package_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shardkeep").mkdir()
    (tmp_path / "shardkeep" / "__main__.py").write_text("raise SystemExit('error: not this one')")
    monkeypatch.chdir(tmp_path)
    summary = train(job_of(tmp_path, test=True, early_stopping=None, epochs=1), tmp_path / "run")
    assert summary.test is not None and summary.test.samples == 60


OFF = {"checkpoint": {"every_steps": "off"}}


@every(
    ("changes", "text"),
    [
        ({"data": {"test": ["/nowhere.csv"]}}, "/nowhere.csv: no such file .data.test."),
        ({"data": {"split": None}}, "train.early_stopping: needs data.eval or data.split"),
        (OFF | {"train": {"early_stopping": None}}, "checkpoint.every_steps: off keeps no model for data.test"),
        (OFF | {"data": {"test": []}}, "checkpoint.every_steps: off keeps no model for train.early_st"),
        ({"data": {"synthetic": {}, "source": "synthetic"}}, "data.test: has no eff"),
    ],
)
def test_what_is_missing_or_does_not_go_together_ends_the_job_before_its_first_step(
    tmp_path: Path, changes: dict[str, dict[str, Any]], text: str
) -> None:
    job = job_of(tmp_path, test=True)
    with pytest.raises((UserError, DataError, ConfigError, ValueError), match=text):
        train(job | {key: job[key] | new for key, new in changes.items()}, tmp_path / "run")
