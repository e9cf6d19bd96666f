"""Whole jobs from their configs, in one process. Those in processes: tests/integration/test_jobs.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import JobError, UserError
from shardkeep.cli.main import app
from shardkeep.run.folder import RunFolder
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import within

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"synthetic": {"train_samples": 4000, "eval_samples": 500, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100, "report_every_s": 0.1},
}


def tiny(**changes: Any) -> shardkeep.JobConfig:
    return shardkeep.JobConfig.model_validate({**TINY, **changes})


def test_a_job_in_one_process_fills_its_run_folder(tmp_path: Path) -> None:
    summary = shardkeep.train(tiny(servers=0, workers=1), run_dir=tmp_path / "run", quiet=True).to_dict()
    folder = RunFolder(tmp_path / "run")
    assert summary == {**(folder.summary() or {}), "run_dir": str(folder.path)}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 40, 4000)
    assert 0.4 < summary["eval"]["auc"] <= 1.0
    assert [t["name"] for t in summary["tables"]] == ["C1", "C2"]
    assert folder.metrics_path.exists()


def test_records_that_cannot_be_read_at_the_end_cost_a_complete_job_nothing(tmp_path: Path) -> None:
    (tmp_path / "run" / "telemetry.jsonl").mkdir(parents=True)
    job = click_job(write_csv(tmp_path / "clicks.csv", click_rows(100)))
    assert shardkeep.train(job, run_dir=tmp_path / "run", quiet=True).status == "completed"


@every("place", ["file/run", "run"], ids=["the run folder", "the token's folder"])
def test_a_place_that_cannot_be_written_is_refused_before_data_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("")
    if place == "run":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    job = click_job(write_csv(tmp_path / "clicks.csv", click_rows(50)), servers=1)
    with pytest.raises(UserError, match=r"file/[\w/]+: cannot be written \(Not a directory\)"):
        shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / place, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks.csv", "file"]


def told(shown: str, name: str) -> list[str]:
    """The texts of the lines of one name."""
    return [line.removeprefix(name).strip() for line in shown.splitlines() if line.startswith(f"{name} ")]


def test_a_job_that_fails_says_where_it_lies_and_how_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "my run"
    train = {**TINY["train"], "report_every_s": 0.001}
    config = tiny(servers=0, workers=1, checkpoint={"every_steps": 10}, train=train)
    shown = RunFolder.progress

    def fails(folder: RunFolder, record: dict[str, Any]) -> None:
        shown(folder, record)
        if 10 < record.get("step", 0) < 20:  # one checkpoint was begun
            kept = folder.path / "checkpoints" / "step-00000010"
            within(90, kept.exists, "no checkpoint", lambda: True)
            raise JobError("something failed")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "progress", fails)
        with pytest.raises(JobError, match="something failed"):
            shardkeep.train(config, run_dir=run)
    printed = capsys.readouterr().out
    assert told(printed, "run") == [str(run), str(run)]
    (command,) = told(printed, "resume")
    head, _, words = command.partition(": ")
    assert head.startswith("to resume at step ") and shlex.split(words) == ["shardkeep", "train", "--resume", str(run)]
    done = CliRunner().invoke(app, shlex.split(words)[1:])
    assert done.exit_code == 0 and (RunFolder(run).summary() or {})["steps"] == 40
    (longer,) = [text for text in told(done.stdout, "resume") if text.startswith("to train longer: ")]
    done = CliRunner().invoke(app, shlex.split(longer.partition(": ")[2])[1:])
    assert done.exit_code == 0 and (RunFolder(run).summary() or {})["steps"] == 80


def test_a_model_that_is_nowhere_is_the_users_error_and_there_is_no_checkpoint_to_resume_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(servers=0, workers=1, model={"name": "no_such_module:tower"})
    with pytest.raises(UserError, match="no_such_module"):
        shardkeep.train(config, run_dir=tmp_path / "run")
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "failed"
    (text,) = told(capsys.readouterr().out, "resume")
    assert text == f"nothing to resume from: no complete checkpoint in {tmp_path / 'run' / 'checkpoints'}"
