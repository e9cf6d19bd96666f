"""Whole jobs from their configs: in one process, and as processes that are stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.report import RunFolder

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"synthetic": {"train_samples": 4000, "eval_samples": 500, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "top": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100, "report_every_s": 0.1},
}
LIMIT_S = 120.0


def tiny(**changes: Any) -> shardkeep.JobConfig:
    return shardkeep.JobConfig.model_validate({**TINY, **changes})


def test_a_job_in_one_process_fills_its_run_folder(tmp_path: Path) -> None:
    summary = shardkeep.train(tiny(servers=0, workers=1), run_dir=tmp_path / "run", quiet=True)
    folder = RunFolder(tmp_path / "run")
    assert summary == folder.summary()
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 40, 4000)
    assert 0.4 < summary["eval"]["auc"] <= 1.0
    assert [t["name"] for t in summary["tables"]] == ["C1", "C2"]
    assert folder.metrics_path.exists()


def test_a_model_option_of_another_model_is_the_users_error_and_written_down(tmp_path: Path) -> None:
    config = tiny(servers=0, workers=1, model={"name": "dlrm", "cross_layers": 2})
    with pytest.raises(UserError, match="cross_layers"):
        shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "failed"


def launch(tmp_path: Path) -> tuple[subprocess.Popen[str], RunFolder]:
    """A job in processes whose end is far away; returns once it trains."""
    config = tiny(servers=1, workers=2, train={"batch_size": 100, "epochs": 100_000, "report_every_s": 0.1})
    (tmp_path / "job.yaml").write_text(config.to_yaml())
    command = [
        sys.executable,
        "-m",
        "shardkeep",
        "train",
        str(tmp_path / "job.yaml"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout is not None
    if not any(line.startswith("train ") for line in job.stdout):
        pytest.fail(f"the job did not start to train: {job.communicate()}")
    return job, RunFolder(tmp_path / "run")


def members(folder: RunFolder) -> dict[str, int]:
    return {f"{m['role']} {m['index']}": m["pid"] for m in folder.member_list()}


@pytest.mark.processes
def test_a_killed_worker_ends_the_job_with_one_line_that_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    job, folder = launch(tmp_path)
    pids = members(folder)
    assert set(pids) == {"coordinator 0", "server 0", "worker 0", "worker 1"}
    os.kill(pids["worker 1"], signal.SIGKILL)
    _, error = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1
    assert error.startswith(f"error: worker 1 (pid {pids['worker 1']}")
    assert "killed by SIGKILL" in error
    assert error.count("\n") == 1
    assert (folder.summary() or {})["status"] == "failed"
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


@pytest.mark.processes
def test_ctrl_c_stops_the_job_in_order_and_leaves_nothing(tmp_path: Path) -> None:
    job, folder = launch(tmp_path)
    pids = members(folder)
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1
    assert error.startswith("stopped at step ")
    assert (folder.summary() or {})["status"] == "stopped"
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
