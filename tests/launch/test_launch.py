"""Whole jobs in one process, from their configs and of data in memory. Those in processes:
tests/integration/test_jobs.py."""

from __future__ import annotations

import fcntl
import io
import mmap
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import CheckpointError, ConfigError, DataError, JobError, UserError
from shardkeep.cli.main import app
from shardkeep.config import JobConfig, load_config, stored_config
from shardkeep.launch.job import run_job, with_shuffle
from shardkeep.page.state import RunState
from shardkeep.ps.checkpoints.probe import unable
from shardkeep.run.folder import RunFolder
from shardkeep.view.screen import PIPED_WIDTH
from shardkeep.workers.checkpoint import writer
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import within
from tests.support.configs import ALONE


def test_a_job_in_one_process_fills_its_run_folder_though_its_records_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run" / "telemetry.jsonl").mkdir(parents=True)
    summary = shardkeep.train(ALONE, run_dir=tmp_path / "run", quiet=True).to_dict()
    folder = RunFolder(tmp_path / "run")
    assert summary == {**(folder.summary() or {}), "run_dir": str(folder.path)}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 40, 1000)
    assert 0.4 < summary["eval"]["auc"] <= 1.0
    assert [t["name"] for t in summary["tables"]] == ["C1", "C2"]
    assert folder.metrics_path.exists()


@every("place", ["file/run", "run"], ids=["the run folder", "the token's folder"])
def test_a_place_that_cannot_be_written_is_refused_before_data_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("")
    if place == "run":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    job = click_job(write_csv(tmp_path / "clicks.csv", click_rows(50)), servers=1)
    with pytest.raises(UserError, match=r"file/[\w/]+: cannot be written \(Not a directory\)"):
        shardkeep.train(job, run_dir=tmp_path / place, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks.csv", "file"]


def lines_of(shown: str, name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in shown.splitlines() if line.startswith(f"{name} ")]


def test_a_job_that_fails_says_where_it_lies_and_how_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "my run"
    train = {**ALONE["train"], "report_every_s": 0.001}
    config = {**ALONE, "checkpoint": {"every_steps": 10}, "train": train}
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
    assert lines_of(printed, "run") == [str(run), str(run)]
    (command,) = lines_of(printed, "resume")
    head, _, words = command.partition(": ")
    assert head.startswith("to resume at step ") and shlex.split(words) == ["shardkeep", "train", "--resume", str(run)]
    done = CliRunner().invoke(app, shlex.split(words)[1:])
    assert done.exit_code == 0 and (RunFolder(run).summary() or {})["steps"] == 40
    (longer,) = [text for text in lines_of(done.stdout, "resume") if text.startswith("to train longer: ")]
    done = CliRunner().invoke(app, shlex.split(longer.partition(": ")[2])[1:])
    assert done.exit_code == 0 and (RunFolder(run).summary() or {})["steps"] == 80


def test_a_job_that_learns_its_rows_by_heart_says_so_at_its_end_and_on_its_page(tmp_path: Path) -> None:
    rows = [row | {"user": f"u{i}", "clicked": str(i * i % 7 % 2)} for i, row in enumerate(click_rows(600))]
    job = click_job(write_csv(tmp_path / "train.csv", rows))
    job |= {"train": {"batch_size": 32, "epochs": 12}, "tables": {"default": {"dim": 8, "optimizer": {"lr": 0.5}}}}
    out = io.StringIO()
    console = Console(file=out, width=PIPED_WIDTH, highlight=False)
    run_job(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", console=console)
    warnings = RunState(tmp_path / "run").sections()["warnings"]
    (overfits,) = [one for one in warnings if "on evaluation rows" in one["text"]]
    assert overfits["level"] == "warn" and "train.early_stopping" in overfits["advice"]
    assert all(f"{one['text']}. {one['advice']}".strip() in out.getvalue() for one in warnings)


# ---- data in memory ----

ROWS = 100
COLUMNS = {"label": "clicked", "dense": ["price"], "sparse": ["user", "tag"]}
FRAME_JOB: dict[str, Any] = {
    "name": "frame",
    "servers": 0,
    "workers": 1,
    "data": COLUMNS,
    "model": {"name": "dlrm", "bottom": [4], "hidden": [4]},
    "tables": {"default": {"dim": 4}},
    "train": {"batch_size": 50},
    "consistency": {"mode": "sync"},
}
SPANS = pa.nulls(1, pa.month_day_nano_interval())


def columns(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 40, ROWS)
    return {
        "clicked": (user + rng.integers(0, 40, ROWS) > 40).astype(int),
        "user": user,
        "tag": [f"t{i}" for i in rng.integers(0, 9, ROWS)],
        "price": rng.normal(size=ROWS).round(3),
    }


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def test_a_frame_of_any_form_trains_the_bits_of_a_file_and_its_run_keeps_its_data_and_is_resumed_from_them(
    tmp_path: Path,
) -> None:
    train, held = columns(), columns(seed=1)
    for name, table in (("train", train), ("held", held)):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    files = {"train": ["train.parquet"], "eval": ["held.parquet"], "root": str(tmp_path)}
    of_file = shardkeep.train({**FRAME_JOB, "data": {**COLUMNS, **files}}, run_dir=tmp_path / "file", quiet=True)
    forms: dict[str, Any] = {"Arrow": pa.table, "columns": dict, "rows": rows}
    for name, form in forms.items():
        run = shardkeep.train(FRAME_JOB, train=form(train), eval=form(held), run_dir=tmp_path / name, quiet=True)
        assert run.state_digest == of_file.state_digest and run.eval == of_file.eval, name
        assert run.steps == ROWS // 50 and run.run_dir == tmp_path / name
        assert shardkeep.load(run.run_dir).predict(form(held)).shape == (ROWS,)
    kept = run.run_dir / "data" / "train.feather"
    before = kept.read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        shardkeep.train(FRAME_JOB, train=columns(seed=2), run_dir=run.run_dir, quiet=True)
    assert kept.read_bytes() == before
    longer = shardkeep.resume(run.run_dir, overrides=["train.epochs=2"], quiet=True)
    assert longer.steps == 2 * run.steps
    assert "<html" in str(longer.report())


def test_a_config_may_be_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_config({**FRAME_JOB, "data": {**COLUMNS, "train": "clicks.csv"}})
    assert job.data.source == "csv" and Path(job.data.root) == tmp_path


@every(
    ("config", "frame", "error", "text"),
    [
        ({**FRAME_JOB, "data": {**COLUMNS, "train": "x.csv"}}, columns(), ConfigError, "leave one of them out"),
        (FRAME_JOB, 5, DataError, "train=: is a int; allowed: a DataFrame"),
        (FRAME_JOB, {"clicked": [1], "user": [1, 2]}, DataError, "train=: cannot be read as columns"),
        (FRAME_JOB, {"clicked": [0, 1]}, DataError, "price"),
        (FRAME_JOB, {"x": SPANS}, DataError, "column user: |has no column|month_day_nano"),
        ({**FRAME_JOB, "nmae": 1}, columns(), ConfigError, "nmae: unknown key; did you mean name"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    tmp_path: Path, config: Any, frame: Any, error: type[UserError], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        shardkeep.train(config, train=frame, run_dir=tmp_path / "run", quiet=True)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


# ---- the end of a job checks that what it was to keep is there ----


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the attempts to write the last checkpoint, in a job of one process."""
    monkeypatch.setattr(writer, "AGAIN_S", (0.0, 0.0))


def in_the_way(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    path = folder / f".step-{step:08d}"
    path.touch()
    return path


def test_a_job_whose_last_checkpoint_cannot_be_written_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    path = in_the_way(kept, 40)
    config = {**ALONE, "checkpoint": {"every_steps": 20, "dir": str(kept)}}
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
    config = {**ALONE, "data": data, "train": {"batch_size": 10}, "checkpoint": {"dir": str(tmp_path / "kept")}}
    with pytest.raises(JobError, match=r"the model of step 4 is not saved: .*; so data.test is not scored"):
        shardkeep.train(config, run_dir=tmp_path / "run")
    assert "test" not in (RunFolder(tmp_path / "run").summary() or {})
    shown = capsys.readouterr().out
    assert lines_of(shown, "resume") == [f"nothing to resume from: no complete checkpoint in {tmp_path / 'kept'}"]
    assert "--resume" not in shown


@every(("given", "order", "stored_bytes", "shuffle"), [
    ("auto", "shuffled", 0, "rows"), ("auto", "shuffled", 500, "rows"), ("auto", "shuffled", 501, "blocks"),
    ("rows", "shuffled", 9000, "rows"), ("blocks", "shuffled", 0, "blocks"), ("auto", "stored", 9000, "auto"),
])  # fmt: skip
def test_samples_larger_than_half_of_the_memory_are_shuffled_in_blocks(
    given: str, order: str, stored_bytes: int, shuffle: str
) -> None:
    config = JobConfig.model_validate({"data": {"shuffle": given}, "train": {"order": order}})
    assert with_shuffle(config, stored_bytes, 1000).data.shuffle == shuffle


def test_a_failure_before_the_last_checkpoint_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    path = in_the_way(tmp_path / "kept", 20)
    config = {**ALONE, "checkpoint": {"every_steps": 10, "dir": str(tmp_path / "kept"), "keep": 9}}
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    assert path.exists() and summary.status == "completed"
    assert stored_config(tmp_path / "run").data.shuffle == "rows"  # as auto has found
    assert len(summary.warnings) == 1 and summary.warnings[0].startswith("no checkpoint at step 20: ")


def test_a_best_model_that_is_not_there_makes_the_job_incomplete(tmp_path: Path) -> None:
    early_stopping = {"metric": "auc", "patience": 1, "min_delta": 0.9}
    in_the_way(tmp_path / "kept", 10)
    config = {
        **ALONE,
        "checkpoint": {"dir": str(tmp_path / "kept")},
        "eval": {"every_steps": 10},
        "train": {**ALONE["train"], "early_stopping": early_stopping},
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
        shardkeep.train(ALONE, run_dir=run, quiet=True)
    assert run.exists() == bool(before) and [str(path.relative_to(run)) for path in run.rglob("*")] == before


def test_what_else_a_folder_lacks_is_one_warning_and_a_job_that_keeps_no_checkpoint_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses(monkeypatch, fcntl, "flock")
    refuses(monkeypatch, Path, "rename")
    assert (
        shardkeep.train({**ALONE, "checkpoint": {"every_steps": "off"}}, run_dir=tmp_path / "run").status == "completed"
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
