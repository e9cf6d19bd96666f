"""`model.sync_norm` between processes, with DDP: a death changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import SHORT
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_job_with_deaths_ends_with_equal_bits(tmp_path: Path) -> None:
    model = {**SHORT.get("model", {}), "norm": "batch", "activation": "dice", "sync_norm": True}
    config: dict[str, Any] = {**SHORT, "model": model}
    digests = []
    with Cluster(tmp_path) as cluster:
        for faults in ([], [Fault.kill("worker 1", at=20), Fault.kill("worker 0", at=45)]):
            job, folder = cluster.job(config, name=f"job-{len(faults)}")
            assert not faults or not play(job, folder, faults, limit_s=120)
            done = job.end(limit_s=120)
            assert (done.code, done.err) == (0, ""), job.printed()
            summary = folder.summary() or {}
            assert summary["bytes"]["tower"]["values"] > 0 and summary["eval"]["auc"] > 0.5
            digests.append(summary["state_digest"])
    assert digests[0] == digests[1]
