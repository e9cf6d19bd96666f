"""The golden job's bytes, beside what the kernel counted on its connections, and what was estimated before it ran."""

from __future__ import annotations

import sys

import pytest

from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from tests.support.golden import Golden

pytestmark = pytest.mark.waits_for_processes
WAYS = (
    ("to_servers", "servers", "sent"),
    ("from_servers", "servers", "received"),
    ("between_workers", "workers", "sent"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket")
def test_the_ledger_agrees_with_the_sockets_counters(golden: Golden) -> None:
    counted, sockets = golden.summary["bytes"], golden.summary["sockets"]
    for way, group, field in WAYS:
        assert counted[way] == pytest.approx(sockets[group][field], rel=0.01), way
    assert min(counted[way] for way, _, _ in WAYS) > 300_000
    control = sockets["control"]["sent"] + sockets["control"]["received"]
    assert (
        control
        <= counted["control"]
        == counted["total"] - sum(sum(counted[name].values()) for name in ("push", "pull", "tower", "read"))
    )


def test_it_moved_as_many_bytes_per_sample_as_was_estimated(golden: Golden) -> None:
    found, summary = estimate(JobConfig.model_validate(golden.config), gbit_per_s=10.0), golden.summary
    assert found["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"], rel=0.05)
    assert [t["rows"] for t in found["tables"]] == [t["rows"] for t in summary["tables"]]
    reported, held = (sum(t["bytes"] for t in tables) for tables in (found["tables"], summary["tables"]))
    assert reported == pytest.approx(held, rel=0.25)
