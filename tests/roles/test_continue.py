"""`shardkeep coordinator --continue` as processes: what it does at each start, and its exit codes."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from shardkeep.member.access import endpoint_of
from shardkeep.ps.control.grpc.client import ControlClient, request_stop
from shardkeep.ps.control.records import TERMINATED
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.cluster import Cluster, Command, within

pytestmark = pytest.mark.waits_for_processes
JOB: dict[str, Any] = {"name": "job", "servers": 1, "workers": 1, "web": {"page": "off"}}


def start(cluster: Cluster, run: RunReader) -> Command:
    """Starts the same command again, which listens on another port, and waits until it listens."""
    command = cluster.continued(JOB)
    number = run.number()
    assert json.loads(command.line("{"))["coordinator"] == run.address()
    assert run.number() > number
    return command


def test_a_stop_by_sigterm_is_to_be_restarted_and_a_stop_by_a_person_is_not(cluster: Cluster, run: RunReader) -> None:
    first = start(cluster, run)
    first.signal(signal.SIGTERM)
    ended = first.end()
    assert ended.code == 143 and f"stopped before the first step: {TERMINATED}\n" in ended.err
    assert (run.summary() or {})["stopped_by"] == TERMINATED
    second = start(cluster, run)
    assert run.summary() is None
    request_stop(endpoint_of(str(run.path)), "shardkeep stop")
    assert second.end().code == 0
    assert (run.summary() or {})["stopped_by"] == "shardkeep stop"


def test_a_member_follows_to_a_coordinator_that_took_over_at_another_address(cluster: Cluster, run: RunReader) -> None:
    first = start(cluster, run)
    with ControlClient(endpoint_of(str(run.path)), role="server", index=0) as member:
        member.register()
        member.start_heartbeats()
        before = member.address
        first.kill()
        second = start(cluster, run)
        assert run.address() != before
        within(60, lambda: member.address == run.address(), "the member does not follow", lambda: second.running)
        request_stop(endpoint_of(str(run.path)), TERMINATED)  # as the node of the first machine does
        assert member.stop_requested.wait(60)
        member.leave(0)
    assert second.end().code == 143


def test_of_two_coordinators_the_older_one_ends_and_stops_nobody(cluster: Cluster, run: RunReader) -> None:
    first = start(cluster, run)
    with ControlClient(endpoint_of(str(run.path)), role="server", index=0) as member:
        member.register()
        member.start_heartbeats()
        second = start(cluster, run)
        ended = first.end()
        assert ended.code == 1 and "another coordinator leads the job; this one, 1, ends" in ended.err
        assert "resume" not in ended.err
        within(60, lambda: member.address == run.address(), "the member does not follow", lambda: second.running)
        assert not member.state.over and run.summary() is None and run.token_path.exists()
    second.signal(signal.SIGTERM)
    assert second.end().code == 143


def test_a_completed_job_ends_at_once_with_0(cluster: Cluster, run: RunReader) -> None:
    start(cluster, run).kill()
    folder = RunFolder(run.path)
    folder.claim()
    folder.finished("completed", "", None)
    ended = cluster.continued(JOB).end()
    assert (ended.code, ended.out, ended.err) == (0, "", f"{run.path}: the job is completed\n")
    assert run.number() == 3 and (run.summary() or {})["status"] == "completed"


@every("option", [("--take-over",), ("--start-step", "3")], ids=["take over", "start step"])
def test_continue_is_given_alone(cluster: Cluster, option: tuple[str, ...]) -> None:
    ended = cluster.continued(JOB, *option).end()
    assert (ended.code, ended.err) == (2, "error: --continue: excludes --take-over and --start-step\n")
