"""Jobs of real processes whose tables admit some ids and let rows go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import JOB, completed
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
POLICIES: dict[str, Any] = {
    **JOB,
    "checkpoint": {"every_steps": 25, "full_every": 4},
    "tables": {
        "default": {"dim": 8, "evict": {"ttl_steps": 2, "sweep_steps": 3}},
        "C1": {"admit": {"min_count": 2, "window_steps": 5}},
        "C2": {
            "admit": {"probability": 0.5},
            "evict": {"delete_below": 0.9, "decay": 0.8, "decay_steps": 2, "sweep_steps": 4, "max_rows": 262_144},
        },
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    with Cluster(tmp_path) as cluster:
        yield cluster


def check_policies(summary: dict[str, Any]) -> None:
    tables = {table["name"]: table for table in summary["tables"]}
    assert all(table["evicted_rows"] > 50 for table in tables.values()), tables
    assert tables["C1"]["refused_rows"] > 50 and tables["C1"]["candidates"] > 0
    assert tables["C2"]["refused_rows"] > 50 and tables["C2"]["admitted_rows"] > 50


@pytest.mark.slow
def test_kills_and_other_numbers_of_servers_change_no_decision(cluster: Cluster) -> None:
    whole = completed(*cluster.job(POLICIES, name="whole"))
    check_policies(whole)
    job, folder = cluster.job(POLICIES, name="killed")
    kills = [Fault.kill("server 0", at=90), Fault.kill("coordinator 0", "worker 1", "server 1", at=240)]
    assert not play(job, folder, kills, limit_s=200.0)
    killed = completed(job, folder)
    assert len(killed["recoveries"]) >= 2
    assert killed["state_digest"] == whole["state_digest"] and killed["eval"] == whole["eval"]
    for servers in (1, 3):
        other = completed(*cluster.job({**POLICIES, "servers": servers}, name=f"servers-{servers}"))
        assert other["state_digest"] == whole["state_digest"]
        assert other["tables"] == [
            {**table, "bytes": mine["bytes"], "load_factor": mine["load_factor"]}
            for table, mine in zip(whole["tables"], other["tables"], strict=True)
        ]


def test_a_clock_in_sync_is_refused_in_one_line(cluster: Cluster) -> None:
    job, _ = cluster.job({**POLICIES, "tables": {"default": {"evict": {"ttl_s": 60}}}}, name="wrong")
    ended = job.end()
    assert ended.code == 2 and "tables.default.evict.ttl_s with consistency.mode: sync" in ended.err, ended.err
    assert len(ended.err.strip().splitlines()) == 1 and "Traceback" not in ended.err
