"""`shardkeep scale`: a running job stops with a checkpoint and resumes with other processes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shardkeep.cli.main import app
from tests.support.cluster import Cluster
from tests.support.golden import TRAINED, Golden


@pytest.mark.waits_for_processes
@pytest.mark.parametrize(
    ("then", "options", "told", "changed"),
    [
        ((1, 1), ("--workers", "2"), "workers=2", "workers=2"),
        pytest.param(
            (2, 2), ("--servers", "1", "--workers", "3"), "workers=3, servers=1", "servers=1, workers=3",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["up", "up and down"],
)  # fmt: skip
def test_a_running_job_is_scaled_and_loses_no_sample(
    cluster: Cluster, then: tuple[int, int], options: tuple[str, ...], told: str, changed: str
) -> None:
    servers, workers = then
    train = {"batch_size": 100 // workers, "report_every_s": 0.05, "epochs": 3}
    job, folder = cluster.job({**TRAINED, "servers": servers, "workers": workers, "train": train}, name="scaled")
    cluster.training(folder)
    asked = cluster.command("scale", str(folder.path), *options).end()
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == f"the job stops with a checkpoint and resumes with {told}\n"
    ended = job.end()
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert f"; changed: {changed}\n" in ended.out
    summary = folder.summary() or {}
    assert (summary["status"], summary["samples"]) == ("completed", 120_000)
    assert {(p["role"], p["index"]) for p in summary["processes"]} >= {("worker", workers), ("server", 0)}


@pytest.mark.waits_for_processes
def test_a_job_that_is_over_is_not_scaled(golden: Golden) -> None:
    asked = CliRunner().invoke(app, ["scale", str(golden.folder.path), "--workers", "2"])
    assert asked.exit_code == 1 and "no job runs here; use shardkeep train --resume" in asked.stderr
