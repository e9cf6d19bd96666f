"""`shardkeep node` on two machines that are commands here, with real roles: the model of the golden job."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.yaml_text import write_yaml
from tests.support.chaos import EDITED
from tests.support.cluster import gone
from tests.support.golden import Golden
from tests.support.hurt import MAIN, Hurt, environment, in_turn, missed
from tests.support.machines import Machines

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]


@pytest.fixture
def job(tmp_path: Path, golden: Golden) -> Iterator[Machines]:
    with Machines(tmp_path, {**golden.config, "servers": 3, "profile": {}}) as machines:
        yield machines


@pytest.mark.group("node")
@pytest.mark.slow
def test_whatever_is_killed_no_step_is_lost_and_the_model_is_that_of_train(
    job: Machines, golden: Golden, tmp_path: Path
) -> None:
    hurts = in_turn(
        Hurt("server 1", "push received", 30),
        Hurt("worker 1", "pushing", 30),
        Hurt("coordinator 0", "progress", 3),
        Hurt("server 2", "push received", 30, companions=("node 1",)),
        Hurt("server 0", "push received", 30, companions=("node 0",)),
    )
    options: dict[str, Any] = {"env": environment(tmp_path, hurts), "main": MAIN}
    nodes = [job.start(rank, **options) for rank in (1, 0)][::-1]
    job.until(lambda: job.step() > 0, "no step")
    job.config.write_text(write_yaml(EDITED))
    for rank in (1, 0):
        assert nodes[rank].end().code == -signal.SIGKILL
        nodes[rank] = job.start(rank, **options)
    assert job.end(nodes) == [0, 0]
    assert not missed(tmp_path, hurts)
    assert [recovery["lost_steps"] for recovery in job.summary["recoveries"]] == [0] * len(job.recoveries())
    assert job.summary["state_digest"] == golden.summary["state_digest"]
    changed = {key for key in EDITED if f"{key}=" in nodes[0].end().err or f" {key}." in nodes[0].end().err}
    assert {"name", "seed", "servers", "workers", "threads"} <= changed and "more" in nodes[0].end().err
    refused = job.start(0).end()
    assert refused.code == 2 and "holds a run with another config already (given: name=" in refused.err


NAMESPACE = ("unshare", "-pf", "--mount-proc", "--kill-child")


@pytest.mark.chaos
def test_as_process_1_of_a_container_it_leaves_at_sigterm_and_continues(job: Machines, golden: Golden) -> None:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("process 1 of a namespace needs root and unshare")
    node = job.start(0, 1, prefix=NAMESPACE, fresh=True)
    job.until(lambda: job.step() > 20, "no step")
    (one,) = node.process.children()
    inside = one.children(recursive=True)
    subprocess.run(["nsenter", "-t", str(one.pid), "-p", "sh", "-c", "sleep 0.1 & exit"], check=True, timeout=60)
    job.until(lambda: len(one.children()) == 1, "process 1 has not collected an orphan")
    one.send_signal(signal.SIGTERM)
    assert node.end().code == 143
    assert job.summary["status"] == "stopped" and not gone(inside, limit_s=10)
    assert job.start(0, 1, prefix=NAMESPACE, fresh=True).end().code == 0
    assert job.summary["state_digest"] == golden.summary["state_digest"]
