"""Jobs whose tower is in shards: they outlive deaths, resume with other workers and with ddp; their models are used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.run.folder import RunFolder
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play, random_faults
from tests.support.golden import TRAINED

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(1500)]
KILLS = int(os.environ.get("SHARDED_KILLS", "8"))
"""Kills of one job at random; `make chaos` sets 20."""
STEPS = 200
JOB: dict[str, Any] = {
    **TRAINED,
    "model": {"bottom": [8], "hidden": [300, 260]},
    "tower": {**TRAINED["tower"], "parallel": "fsdp"},
    "consistency": {"mode": "bounded", "staleness": 1},
    "train": {"batch_size": 25, "accumulate": 2, "clip_norm": 1.0, "max_steps": STEPS, "report_every_s": 0.02},
    "eval": {"every_steps": 100},
    "checkpoint": {"every_steps": 40},
    "recovery": {"restarts": KILLS},
}


def completed(job: Any, folder: RunFolder, *, limit_s: float = 300.0) -> dict[str, Any]:
    ended = job.end(limit_s=limit_s)
    assert (ended.code, ended.err) == (0, ""), job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert 0.55 < summary["eval"]["auc"] <= summary["eval"]["best_auc"]
    return summary


@pytest.mark.slow
def test_a_job_goes_back_to_its_checkpoint_when_a_worker_dies(cluster: Cluster) -> None:
    job, folder = cluster.job(JOB)
    assert not play(job, folder, [Fault.kill("worker 1", at=60)], limit_s=200.0)
    (recovery,) = completed(job, folder)["recoveries"]
    assert recovery["went_back"] and recovery["step"] in (40, 80) and "worker 1" in recovery["cause"]


@pytest.mark.slow
def test_workers_keep_their_parts_when_a_server_dies_while_no_step_is_under_way(cluster: Cluster) -> None:
    job, folder = cluster.job({**JOB, "data": {"synthetic": {**JOB["data"]["synthetic"], "eval_samples": 100_000}}})
    assert not play(job, folder, [Fault.kill("server 0", at="evaluating")], limit_s=200.0)
    (recovery,) = completed(job, folder)["recoveries"]
    assert (recovery["step"], recovery["went_back"], recovery["lost_steps"]) == (100, False, 0)


@pytest.mark.slow
def test_a_job_outlives_kills_of_servers_and_workers(cluster: Cluster) -> None:
    job, folder = cluster.job({**JOB, "checkpoint": {"every_steps": 10}})
    members = ["server 0", "server 1", "worker 0", "worker 1", "coordinator 0"]
    every = (STEPS - 20) // KILLS
    play(job, folder, random_faults(KILLS, seed=5, members=members, first=12, every=every), limit_s=900.0)
    recoveries = completed(job, folder, limit_s=900.0)["recoveries"]
    assert len(recoveries) >= KILLS // 2
    assert any(recovery["went_back"] for recovery in recoveries)


@pytest.mark.slow
def test_a_stopped_job_resumes_with_three_workers_and_with_ddp(cluster: Cluster, tmp_path: Path) -> None:
    job, folder = cluster.job({**JOB, "train": {**JOB["train"], "max_steps": 80}})
    assert job.end(limit_s=200.0).code == 0
    for changes in (["workers=3", "train.max_steps=120"], ["tower.parallel=ddp", f"train.max_steps={STEPS}"]):
        settings = [part for change in changes for part in ("--set", change)]
        ended = cluster.command("train", "--resume", str(folder.path), *settings).end(limit_s=200.0)
        assert (ended.code, ended.err) == (0, ""), ended.out
    summary = folder.summary() or {}
    assert summary["steps"] == STEPS and summary["eval"]["auc"] > 0.55
    assert used(cluster, folder, tmp_path) == pytest.approx(summary["eval"]["auc"], abs=1e-6)


def used(cluster: Cluster, folder: RunFolder, tmp_path: Path) -> float:
    """The AUC of a run, evaluated from its checkpoint; its export loads, and another run in shards begins with it."""
    evaluated = cluster.command("evaluate", str(folder.path), "--json").end(limit_s=100.0)
    assert evaluated.code == 0, evaluated.err
    assert cluster.command("export", str(folder.path), str(tmp_path / "out")).end(limit_s=100.0).code == 0
    assert shardkeep.load(tmp_path / "out") is not None
    job, begun = cluster.job(
        {**JOB, "train": {**JOB["train"], "max_steps": 20}}, "--from", str(folder.path), name="begun"
    )
    assert job.end(limit_s=200.0).code == 0, job.printed()
    assert (begun.summary() or {})["eval"]["auc"] > 0.6
    return float(evaluated.out.split('"auc": ')[1].split(",")[0])
