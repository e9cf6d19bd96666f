"""The end of a job checks that what it was to keep is there."""

from __future__ import annotations

import fcntl
import mmap
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import CheckpointError, JobError
from shardkeep.cli.main import app
from shardkeep.page.state import RunState
from shardkeep.ps.checkpoints.probe import unable
from shardkeep.run.folder import RunFolder
from shardkeep.workers.checkpoint import writer
from tests.support.cases import every

JOB: dict[str, Any] = {
    "servers": 0,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 400, "eval_samples": 100, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 10},
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the attempts to write the last checkpoint, in a job of one process."""
    monkeypatch.setattr(writer, "AGAIN_S", (0.0, 0.0))


def lines_of(shown: str, name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in shown.splitlines() if line.startswith(f"{name} ")]


def in_the_way(folder: Path, step: int) -> Path:
    """A file where the checkpoint of this step is to be written."""
    folder.mkdir(parents=True)
    path = folder / f".step-{step:08d}"
    path.touch()
    return path


@pytest.mark.parametrize("processes", [{}, pytest.param({"servers": 1}, marks=pytest.mark.chaos)])
def test_a_job_whose_last_checkpoint_cannot_be_written_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: dict[str, int]
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    path = in_the_way(kept, 40)
    config = {**JOB, **processes, "checkpoint": {"every_steps": 20, "dir": str(kept)}}
    with pytest.raises(JobError, match=r"the model of step 40 is not saved: .*File exists"):
        shardkeep.train(config, run_dir=run)
    shown = capsys.readouterr().out
    assert sum("no checkpoint at step 40: " in line for line in lines_of(shown, "checkpoint")) == 3  # tried again
    (resume,) = lines_of(shown, "resume")
    assert resume.startswith("to resume at step 20: ") and "to train longer" not in shown
    summary = RunFolder(run).summary() or {}
    assert (summary["status"], summary["steps"]) == ("incomplete", 40) and summary["eval"]["auc"] > 0
    (warning,) = summary["warnings"]
    assert warning.startswith("no checkpoint at step 40: ") and warning.endswith("(3 times; this is the last)")
    status = CliRunner().invoke(app, ["status", str(run)])
    assert status.exit_code == 1 and status.stdout.startswith("incomplete: the model of step 40 is not saved")
    assert [w["text"] for w in RunState(run).sections()["warnings"] if w["level"] == "bad"] == [
        f"the job is incomplete: {summary['message']}"
    ]
    path.unlink()
    again = shardkeep.resume(run, quiet=True)
    assert (again.status, again.steps, again.starts[0].from_step) == ("completed", 40, 0)


def test_a_job_without_any_checkpoint_names_none_to_resume_from_and_scores_no_test_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.csv", "test.csv"):
        rows = "\n".join(f"{n % 2},{n},{n % 7}{name}" for n in range(40))
        (tmp_path / name).write_text(f"label,number,text\n{rows}\n")
    data = {"train": [str(tmp_path / "train.csv")], "test": [str(tmp_path / "test.csv")], "label": "label"}
    data |= {"dense": ["number"], "sparse": ["text"], "cache": str(tmp_path / "cache")}
    in_the_way(tmp_path / "kept", 4)
    config = {**JOB, "data": data, "checkpoint": {"dir": str(tmp_path / "kept")}}
    with pytest.raises(JobError, match=r"the model of step 4 is not saved: .*; so data.test is not scored"):
        shardkeep.train(config, run_dir=tmp_path / "run")
    assert "test" not in (RunFolder(tmp_path / "run").summary() or {})
    shown = capsys.readouterr().out
    assert lines_of(shown, "resume") == [f"nothing to resume from: no complete checkpoint in {tmp_path / 'kept'}"]
    assert "--resume" not in shown


def test_a_failure_before_the_last_checkpoint_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    path = in_the_way(tmp_path / "kept", 20)
    config = {**JOB, "checkpoint": {"every_steps": 10, "dir": str(tmp_path / "kept"), "keep": 9}}
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    assert path.exists() and summary.status == "completed"
    assert len(summary.warnings) == 1 and summary.warnings[0].startswith("no checkpoint at step 20: ")


def test_a_best_model_that_is_not_there_makes_the_job_incomplete(tmp_path: Path) -> None:
    early_stopping = {"metric": "auc", "patience": 1, "min_delta": 0.9}
    in_the_way(tmp_path / "kept", 10)
    config = {
        **JOB,
        "checkpoint": {"dir": str(tmp_path / "kept")},
        "eval": {"every_steps": 10},
        "train": {**JOB["train"], "early_stopping": early_stopping},
    }
    with pytest.raises(JobError, match="the best model, of step 10, is not saved"):
        shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    summary = RunFolder(tmp_path / "run").summary() or {}
    assert (summary["status"], summary["steps"], summary["best"]["step"]) == ("incomplete", 20, 10)


def refuses(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module, name, refused)


@every("before", [[], ["notes", "notes/mine.txt"]], ids=["a new folder", "a folder with files"])
def test_a_folder_that_can_keep_no_checkpoint_is_refused_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    run = tmp_path / "run"
    if before:
        (run / "notes").mkdir(parents=True)
        (run / "notes" / "mine.txt").write_text("mine")
    why = r"cannot keep checkpoints: folders cannot be made and renamed there \(Operation not supported\); allowed: "
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=why):
        refuses(patch, Path, "rename")
        shardkeep.train(JOB, run_dir=run, quiet=True)
    assert run.exists() == bool(before) and [str(path.relative_to(run)) for path in run.rglob("*")] == before


def test_what_else_a_folder_lacks_is_one_warning_and_a_job_that_keeps_no_checkpoint_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses(monkeypatch, fcntl, "flock")
    refuses(monkeypatch, Path, "rename")
    assert (
        shardkeep.train({**JOB, "checkpoint": {"every_steps": "off"}}, run_dir=tmp_path / "run").status == "completed"
    )
    (text,) = lines_of(capsys.readouterr().out, "warning")
    assert text.startswith(f"{tmp_path / 'run'} has no file locks (Operation not supported): ")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_every_ability_of_a_folder_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unable(tmp_path) == []
    with monkeypatch.context() as patch:
        refuses(patch, fcntl, "flock")
        refuses(patch, mmap, "mmap")
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
        found = unable(tmp_path)
    assert [text.split(":")[0] for text in found] == [
        "no file locks (Operation not supported)",
        "no shared mappings (Operation not supported)",
        "1.0 MB free",
    ]
    assert list(tmp_path.iterdir()) == []
