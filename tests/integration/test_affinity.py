"""Pinned jobs as real processes: by the system, every thread runs on the cores of the config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardkeep
from tests.support.cluster import Cluster

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them"),
]

TRAIN = {"batch_size": 50, "report_every_s": 0.05}
ENDLESS: dict[str, Any] = {
    "name": "pinned",
    "servers": 2,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 1950, "eval_samples": 300, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {**TRAIN, "epochs": 100_000},
    "eval": {"every_steps": 1_000_000},
}


def cores_of_threads(process: psutil.Process) -> set[int]:
    """Every core that some thread of the process may use."""
    return set().union(*(os.sched_getaffinity(thread.id) for thread in process.threads()))


def test_a_core_that_is_not_there_ends_the_command_before_anything_starts(cluster: Cluster) -> None:
    job, folder = cluster.job(ENDLESS, "--set", "launch.affinity={workers: [[4000]]}")
    ended = job.end()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: launch.affinity.workers: there is no core 4000 to use; allowed: ")
    assert not folder.config_path.exists()


def test_a_job_in_this_process_is_pinned_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {
        **ENDLESS,
        "servers": 0,
        "train": {**TRAIN, "epochs": 1},
        "threads": "auto",
        "launch": {"affinity": {"workers": [[CORES[1]]]}},
    }
    summary = shardkeep.train(shardkeep.JobConfig.model_validate(alone), run_dir=tmp_path / "run").to_dict()
    said = capsys.readouterr().out
    assert f"worker 0 on core {CORES[1]}" in said and "threads   1 for each worker, of " in said
    assert [p["cores"] for p in summary["processes"]] == [str(CORES[1])]
    assert os.sched_getaffinity(0) == set(CORES)


def test_a_coordinator_by_hand_refuses_an_affinity_that_nobody_would_apply(cluster: Cluster) -> None:
    coordinator = cluster.command("coordinator", str(cluster.write({**ENDLESS, "launch": {"affinity": "auto"}})))
    ended = coordinator.end()
    assert ended.code == 2
    assert ended.err == (
        "error: launch.affinity: only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)\n"
    )
