"""Jobs whose tower is in shards: they outlive deaths, resume with other workers and with ddp; their models are used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chaos import JOB as REPLICATED, causes, hurt_job
from tests.support.cluster import Cluster
from tests.support.golden import STEPS
from tests.support.hurt import Hurt, in_turn

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
JOB: dict[str, Any] = {
    **REPLICATED,
    "model": {"bottom": [8], "hidden": [300, 260]},
    "tower": {**REPLICATED["tower"], "parallel": "fsdp"},
    "consistency": {"mode": "bounded", "staleness": 1},
    "train": {"batch_size": 25, "accumulate": 2, "clip_norm": 1.0, "max_steps": STEPS, "report_every_s": 0.02},
    "eval": {"every_steps": 100},
    "checkpoint": {"every_steps": 40},
}


def learned(summary: dict[str, Any]) -> bool:
    return 0.55 < summary["eval"]["auc"] <= summary["eval"]["best_auc"]


@pytest.mark.slow
def test_workers_keep_their_parts_when_a_server_dies_and_go_back_to_the_checkpoint_when_one_of_them_dies(
    cluster: Cluster,
) -> None:
    """The server dies while the first evaluation reads, so while no step is under way."""
    hurts = in_turn(Hurt("server 0", "read received", 1), Hurt("worker 1", "pushing", 120))
    summary = hurt_job(cluster, JOB, hurts)
    assert learned(summary)
    kept, *_, back = summary["recoveries"]
    assert (kept["step"], kept["went_back"], kept["lost_steps"]) == (100, False, 0) and "server 0" in kept["cause"]
    assert back["went_back"] and back["step"] in (80, 120, 160) and "worker 1" in causes(summary)


@pytest.mark.chaos
def test_a_job_outlives_kills_of_servers_and_workers(cluster: Cluster) -> None:
    points = {"server 0": "push received", "worker 0": "pushing", "worker 1": "pulling", "server 1": "applied"}
    hurts = [Hurt(member, point, 20) for member, point in points.items()]
    hurts += [Hurt("coordinator 0", "progress", 3), *(Hurt(member, point, 15) for member, point in points.items())]
    config = {**JOB, "checkpoint": {"every_steps": 10}}
    summary = hurt_job(cluster, config, in_turn(*hurts))
    assert learned(summary) and len(summary["recoveries"]) >= 4
    assert any(recovery["went_back"] for recovery in summary["recoveries"])
