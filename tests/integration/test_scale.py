"""`shardkeep scale`: a running job stops with a checkpoint and resumes with other processes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shardkeep.cli.main import app
from tests.support.cluster import Cluster
from tests.support.golden import TRAINED, Golden


@pytest.mark.slow  # with stand-ins: tests/launch/test_supervised_stops.py
@pytest.mark.waits_for_processes
def test_a_running_job_is_scaled_up_and_down_and_loses_no_sample(cluster: Cluster) -> None:
    train = {"batch_size": 50, "report_every_s": 0.05, "epochs": 6}
    job, folder = cluster.job({**TRAINED, "train": train}, name="scaled")
    cluster.training(folder)
    asked = cluster.command("scale", str(folder.path), "--servers", "1", "--workers", "3").end()
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == "the job stops with a checkpoint and resumes with workers=3, servers=1\n"
    ended = job.end()
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert "; changed: servers=1, workers=3\n" in ended.out
    summary = folder.summary() or {}
    assert (summary["status"], summary["samples"]) == ("completed", 120_000)
    assert {(p["role"], p["index"]) for p in summary["processes"]} >= {("worker", 2), ("server", 0)}


@pytest.mark.waits_for_processes
def test_a_job_that_is_over_is_not_scaled(golden: Golden) -> None:
    asked = CliRunner().invoke(app, ["scale", str(golden.folder.path), "--workers", "2"])
    assert asked.exit_code == 1 and "no job runs here; use shardkeep train --resume" in asked.stderr
