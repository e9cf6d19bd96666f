"""The byte ledger of a job of real processes beside what the kernel counted on their connections."""

from __future__ import annotations

import sys

import pytest

from tests.support.golden import Golden

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells its counters on Linux"),
]

WAYS = (
    ("to_servers", "servers", "sent"),
    ("from_servers", "servers", "received"),
    ("between_workers", "workers", "sent"),
)


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
