"""Pinned jobs: by the system, every thread runs on the cores of the config."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardkeep
from tests.support.cluster import Cluster
from tests.support.configs import TINY

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them"),
]


def test_an_affinity_that_cannot_be_or_that_nobody_would_apply_is_refused(cluster: Cluster) -> None:
    job, folder = cluster.job(TINY, "--set", "launch.affinity={workers: [[4000]]}")
    ended = job.end()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: launch.affinity.workers: there is no core 4000 to use; allowed: ")
    assert not folder.config_path.exists()
    by_hand = cluster.command("coordinator", str(cluster.write({**TINY, "launch": {"affinity": "auto"}}))).end()
    text = "only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)"
    assert (by_hand.code, by_hand.err) == (2, f"error: launch.affinity: {text}\n")


def test_a_job_in_this_process_is_pinned_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = {"servers": 0, "workers": 1, "threads": "auto", "launch": {"affinity": {"workers": [[CORES[1]]]}}}
    config = shardkeep.JobConfig.model_validate({**TINY, **pinned})
    summary = shardkeep.train(config, run_dir=tmp_path / "run").to_dict()
    said = capsys.readouterr().out
    assert f"worker 0 on core {CORES[1]}" in said and "threads   1 for each worker, of " in said
    assert [p["cores"] for p in summary["processes"]] == [str(CORES[1])]
    assert os.sched_getaffinity(0) == set(CORES)
