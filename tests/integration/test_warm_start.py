"""`train --from RUN` in `sync` while processes die before the job's first checkpoint of its own: the same bits."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.support.chaos import SHORT, SHORT_STEPS
from tests.support.cluster import Cluster, Command, RunFolder
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(600)]


def ended(job: Command, folder: RunFolder) -> dict[str, Any]:
    done = job.end(limit_s=200)
    assert (done.code, done.err) == (0, ""), job.printed()
    return folder.summary() or {}


def test_deaths_before_the_first_checkpoint_change_no_bit(cluster: Cluster) -> None:
    config = {**SHORT, "checkpoint": {"every_steps": 1000}}
    before, run = cluster.job({**config, "servers": 1, "seed": 4}, name="before")
    assert ended(before, run)["status"] == "completed"
    whole = ended(*cluster.job(config, "--from", str(run.path), name="whole"))
    assert whole["status"] == "completed" and whole["steps"] == SHORT_STEPS
    job, folder = cluster.job(config, "--from", str(run.path), name="disturbed")
    faults = [
        Fault.kill("server 0", at=30),
        Fault.kill("worker 0", at=60),
        Fault.kill("coordinator 0", at=90),
        Fault.kill("worker 0", "worker 1", "server 1", at=120),
    ]
    assert not play(job, folder, faults, limit_s=200)
    shutil.rmtree(run.path)  # nothing needs it any more
    assert ended(job, folder)["state_digest"] == whole["state_digest"]
    assert whole["eval"]["auc"] > 0.5


def test_a_job_without_journals_goes_back_to_the_model_that_it_began_with(cluster: Cluster) -> None:
    config = {**SHORT, "checkpoint": {"every_steps": 1000}, "recovery": {"journal": "off"}}
    before, run = cluster.job({**config, "seed": 4, "train": {**SHORT["train"], "max_steps": 100}}, name="before")
    assert ended(before, run)["status"] == "completed"
    whole = ended(*cluster.job(config, "--from", str(run.path), name="whole"))
    job, folder = cluster.job(config, "--from", str(run.path), name="disturbed")
    assert not play(job, folder, [Fault.kill("server 0", at=60)], limit_s=200)
    summary = ended(job, folder)
    assert summary["state_digest"] == whole["state_digest"]
    assert [recovery["step"] for recovery in summary["recoveries"]] == [0]
