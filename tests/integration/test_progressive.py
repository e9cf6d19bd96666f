"""Progressive validation in `sync` while processes die: every sample is scored once, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import SHORT
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play
from tests.support.records import records_in

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(600)]
EVERY = 40


def test_deaths_change_no_score(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **SHORT,
        "train": {**SHORT["train"], "order": "time"},
        "eval": {**SHORT["eval"], "every_steps": EVERY},
        "checkpoint": {"every_steps": 30, "keep": 1},
    }
    with Cluster(tmp_path) as cluster:
        job, folder = cluster.job(config, name="whole")
        done = job.end(limit_s=200)
        assert (done.code, done.err) == (0, ""), job.printed()
        whole = folder.summary() or {}
        assert whole["progressive"]["samples"] == whole["samples"] and whole["progressive"]["auc"] > 0.5
        job, folder = cluster.job(config)
        faults = [
            Fault.kill("worker 1", at=25),
            Fault.kill("server 0", at=EVERY),
            Fault.kill("worker 0", at=EVERY + 7),
            Fault.kill("coordinator 0", at=2 * EVERY + 1),
            Fault.kill("worker 0", "worker 1", at=2 * EVERY + 5),
        ]
        assert not play(job, folder, faults, limit_s=200)
        done = job.end(limit_s=200)
        assert (done.code, done.err) == (0, ""), job.printed()
        summary = folder.summary() or {}
        assert (summary["state_digest"], summary["progressive"]) == (whole["state_digest"], whole["progressive"])
        records = [r for r in records_in(folder.path / "metrics.jsonl") if r.get("phase") == "progressive"]
        by_step = {r["step"]: (r["samples"], r["auc"], r["logloss"]) for r in records}
        assert sum(samples for samples, _, _ in by_step.values()) == whole["samples"]
