"""Jobs whose coordinator is started by one command, `--continue`: they end with the same bits."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from shardkeep.ps.control.records import TERMINATED
from shardkeep.run.reader import RunReader
from tests.support.cluster import Cluster, Command, gone, kill, within
from tests.support.golden import STEPS, TRAINED, Golden
from tests.support.hurt import MAIN, Hurt, environment, missed

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.chaos]
ROLES = [("server", 0), ("server", 1), ("worker", 0), ("worker", 1)]


def lead(cluster: Cluster) -> Command:
    """A coordinator that listens."""
    command = cluster.continued(TRAINED)
    command.line("{")
    return command


def join(cluster: Cluster, run: RunReader, **options: Any) -> list[Command]:
    where = ("--coordinator", str(run.path), "--run-dir", str(run.path.parent))
    return [cluster.command(role, *where, "--index", str(index), **options) for role, index in ROLES]


def held(cluster: Cluster, run: RunReader, coordinator: Command) -> list[Command]:
    """The members of a job that stands at step 60, because a worker is stopped."""
    folder, stop = cluster.folder("hurts"), Hurt("worker 1", "pushing", 120, "SIGSTOP", silent=False)
    members = join(cluster, run, env=environment(folder, [stop]), main=MAIN)
    within(200, lambda: not missed(folder, [stop]), "no step 60", lambda: coordinator.running)
    return members


def completed(run: RunReader, golden: Golden, *commands: Command) -> dict[str, Any]:
    assert [command.end().code for command in commands] == [0] * len(commands), [c.printed() for c in commands]
    summary = run.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["state_digest"] == golden.summary["state_digest"]
    return summary


def test_a_coordinator_that_was_killed_takes_over_at_another_address(
    cluster: Cluster, run: RunReader, golden: Golden
) -> None:
    first = lead(cluster)
    members = held(cluster, run, first)
    before = run.address()
    first.kill()
    members[-1].signal(signal.SIGCONT)
    second = lead(cluster)
    assert run.address() != before
    summary = completed(run, golden, second, *members)
    assert sum(recovery["lost_steps"] for recovery in summary["recoveries"]) == 0


def test_a_job_of_which_everything_was_killed_loses_no_step(cluster: Cluster, run: RunReader, golden: Golden) -> None:
    first = lead(cluster)
    members = held(cluster, run, first)
    everything = [command.process for command in (first, *members)]
    kill(everything)
    assert not gone(everything, limit_s=20)
    second = lead(cluster)
    summary = completed(run, golden, second, *join(cluster, run))
    assert len(summary["starts"]) == 1 and sum(recovery["lost_steps"] for recovery in summary["recoveries"]) == 0


def test_a_job_that_an_engine_stopped_goes_on_where_it_stopped(
    cluster: Cluster, run: RunReader, golden: Golden
) -> None:
    first = lead(cluster)
    members = held(cluster, run, first)
    first.signal(signal.SIGTERM)
    members[-1].signal(signal.SIGCONT)
    assert first.end().code == 143
    assert {command.end().code for command in members} == {1}
    stopped = run.summary() or {}
    assert stopped["stopped_by"] == TERMINATED
    second = lead(cluster)
    summary = completed(run, golden, second, *join(cluster, run))
    assert [start["status"] for start in summary["starts"]] == ["stopped", "completed"]
    assert summary["starts"][1]["from_step"] == stopped["steps"]
    assert cluster.continued(TRAINED).end().code == 0
