"""Requests to stop a job, or to continue with other numbers, at a bad moment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, records, within
from tests.support.configs import TINY

pytestmark = pytest.mark.waits_for_processes

EVALUATED = 60_000
"""So many that Ctrl-C comes before they are evaluated."""


@pytest.mark.chaos
def test_roles_by_hand_that_are_asked_to_leave_are_replaced_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    config = {**TINY, "servers": 1, "workers": 2, "train": {**TINY["train"], "epochs": 10_000}}
    config["checkpoint"] = {"every_steps": 1_000_000, "dir": str(tmp_path / "checkpoints")}
    coordinator, address, folder = cluster.coordinator(config)
    members = {(role, i): cluster.role(role, i, address) for role, i in (("server", 0), ("worker", 0), ("worker", 1))}
    cluster.training(folder)

    def recovered() -> int:
        return sum(r.get("phase") == "recovery" for r in records(folder))

    for number, leaving, code in (
        (1, ("worker", 1), signal.SIGTERM),
        (2, ("server", 0), signal.SIGTERM),
        (3, ("worker", 0), signal.SIGINT),
    ):
        members[leaving].signal(code)
        ended = members[leaving].end(limit_s=90)
        assert (ended.code, ended.err.splitlines()[-1]) == (128 + code, f"left on {code.name}")
        members[leaving] = cluster.role(*leaving, address)
        within(60, lambda n=number: recovered() >= n, "no recovery", lambda: coordinator.running)
    coordinator.signal(signal.SIGTERM)
    ended = coordinator.end(limit_s=90)
    assert ended.code == 1 and "stopped at step" in ended.err
    assert [command.end(limit_s=90).code for command in members.values()] == [1, 1, 1]
    assert list((tmp_path / "checkpoints").glob("step-*"))


def test_ctrl_c_after_the_last_step_leaves_a_completed_job(cluster: Cluster) -> None:
    """In one process; of processes with stand-ins: tests/launch/test_supervised_stops.py."""
    data = {"synthetic": {**TINY["data"]["synthetic"], "eval_samples": EVALUATED}}
    config = {**TINY, "servers": 0, "workers": 1, "data": data, "checkpoint": {"every_steps": 1000}}
    job, folder = cluster.job(config)
    within(60, lambda: any(r.get("step") == 39 for r in records(folder)), "no last step", lambda: job.running)
    job.signal(signal.SIGINT)
    ended = job.end()
    notice = "stopping after the running step; press Ctrl-C again to end it at once\n"
    assert (ended.code, ended.err) == (0, notice), job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", 39)
    assert summary["eval"]["samples"] == EVALUATED and summary["state_digest"]
