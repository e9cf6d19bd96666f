"""The closing table of a job: it warns of what the page of the job warns of."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from shardkeep.config import JobConfig
from shardkeep.launch.job import run_job
from shardkeep.page.state import RunState
from shardkeep.view.screen import PIPED_WIDTH
from tests.support.click_files import click_job, click_rows, write_csv


def test_a_job_that_learns_its_rows_by_heart_says_so_at_its_end_and_on_its_page(tmp_path: Path) -> None:
    rows = [row | {"user": f"u{i}", "clicked": str(i * i % 7 % 2)} for i, row in enumerate(click_rows(600))]
    job = click_job(write_csv(tmp_path / "train.csv", rows))
    job |= {"train": {"batch_size": 32, "epochs": 12}, "tables": {"default": {"dim": 8, "optimizer": {"lr": 0.5}}}}
    out = io.StringIO()
    console = Console(file=out, width=PIPED_WIDTH, highlight=False)
    run_job(JobConfig.model_validate(job), run_dir=tmp_path / "run", console=console)
    warnings = RunState(tmp_path / "run").sections()["warnings"]
    (overfits,) = [one for one in warnings if "on evaluation rows" in one["text"]]
    assert overfits["level"] == "warn" and "train.early_stopping" in overfits["advice"]
    assert all(f"{one['text']}. {one['advice']}".strip() in out.getvalue() for one in warnings)
