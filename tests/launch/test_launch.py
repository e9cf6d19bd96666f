"""Whole jobs in one process, from their configs and of data in memory. Those in processes:
tests/integration/test_jobs.py."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError, DataError, JobError, UserError
from shardkeep.cli.main import app
from shardkeep.config import load_config
from shardkeep.launch.job import run_job
from shardkeep.page.state import RunState
from shardkeep.run.folder import RunFolder
from shardkeep.view.screen import PIPED_WIDTH
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import within

TINY: dict[str, Any] = {
    "servers": 0,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 4000, "eval_samples": 500, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100, "report_every_s": 0.1},
}


def test_a_job_in_one_process_fills_its_run_folder_though_its_records_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run" / "telemetry.jsonl").mkdir(parents=True)
    summary = shardkeep.train(TINY, run_dir=tmp_path / "run", quiet=True).to_dict()
    folder = RunFolder(tmp_path / "run")
    assert summary == {**(folder.summary() or {}), "run_dir": str(folder.path)}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 40, 4000)
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
    """The texts of the lines of one name."""
    return [line.removeprefix(name).strip() for line in shown.splitlines() if line.startswith(f"{name} ")]


def test_a_job_that_fails_says_where_it_lies_and_how_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "my run"
    train = {**TINY["train"], "report_every_s": 0.001}
    config = {**TINY, "checkpoint": {"every_steps": 10}, "train": train}
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
    kept = run.run_dir / "data" / "train.parquet"
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
        (FRAME_JOB, {"x": SPANS}, DataError, "column x: holds .*; leave the column out"),
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
