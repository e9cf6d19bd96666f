"""The byte ledger of a job of real processes beside what the kernel counted on their connections."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells its counters on Linux"),
]

JOB: dict[str, Any] = {
    "name": "wire",
    "seed": 3,
    "servers": 2,
    "workers": 2,
    "data": {
        "source": "synthetic",
        "synthetic": {"train_samples": 20_000, "eval_samples": 1000, "table_sizes": [50_000, 20_000, 3000]},
    },
    "model": {"name": "dlrm", "bottom": [64], "top": [64]},
    "tower": {"compile": "off", "amp": "off"},
    "train": {"batch_size": 1024},
    "transport": {"same_host": "sockets"},
    "checkpoint": {"every_steps": 0},
}
WAYS = (
    ("to_servers", "servers", "sent"),
    ("from_servers", "servers", "received"),
    ("between_workers", "workers", "sent"),
)


def test_the_ledger_agrees_with_the_sockets_counters(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        command, folder = cluster.job(JOB)
        assert command.end().code == 0
    summary = folder.summary() or {}
    counted, sockets = summary["bytes"], summary["sockets"]
    for way, group, field in WAYS:
        assert counted[way] == pytest.approx(sockets[group][field], rel=0.01), way
    assert min(counted[way] for way, _, _ in WAYS) > 300_000
    control = sockets["control"]["sent"] + sockets["control"]["received"]
    assert (
        control
        <= counted["control"]
        == counted["total"] - sum(sum(counted[name].values()) for name in ("push", "pull", "tower", "read"))
    )
