"""Jobs on a Slurm cluster of three hosts, by deploy/slurm.sbatch as it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.reader import RunReader
from tests.support.chaos import JOB
from tests.support.cluster import patient, records, stalled, within
from tests.support.golden import Golden
from tests.support.hosts import missing, worker_on
from tests.support.slurm import Job, Slurm, missing_program, slurm

REASON = missing() or missing_program()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(600),
    pytest.mark.group("slurm"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"
TWO = ("--nodes=2", "--cpus-per-task=1")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Of a user with a command `shardkeep`."""
    command = tmp_path_factory.mktemp("bin") / "shardkeep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardkeep "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    with slurm(3, {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Slurm) -> Iterator[Slurm]:
    """The cluster; a test that fails shows what it printed."""
    yield whole_cluster
    print(whole_cluster.printed())


class Training:
    """The job of deploy/slurm.sbatch in a folder of its own."""

    def __init__(self, cluster: Slurm, name: str, *, lease_s: float) -> None:
        self._cluster = cluster
        self._folder = cluster.work / name
        self._folder.mkdir()
        (self._folder / "clicks.yaml").write_text(write_yaml(patient({**JOB, "liveness": {"lease_s": lease_s}})))
        self.run = RunReader(self._folder / "runs" / "clicks")
        self.number = ""

    def submit(self, *options: str) -> None:
        self.number = self._cluster.submit(SCRIPT, *TWO, f"--chdir={self._folder}", *options)

    def step(self) -> int:
        return max((record["step"] for record in records(self.run) if record["kind"] == "progress"), default=0)

    def train(self, step: int) -> None:
        """Waits for a step."""
        within(
            LIMIT_S,
            lambda: self.step() >= step,
            f"no step {step}",
            lambda: self.summary.get("status") in (None, "stopped"),
        )

    def end(self, golden: Golden) -> Job:
        """Waits for its end, with the model of an undisturbed `shardkeep train`."""
        job = self._cluster.wait(self.number, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", limit_s=LIMIT_S)
        assert (job.state, job.exit_code) == ("COMPLETED", 0)
        assert self.summary["state_digest"] == golden.summary["state_digest"]
        return job

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary() or {}

    def trained_again(self) -> int:
        """The number of steps that were trained twice, as those were lost."""
        steps = [record["step"] for record in records(self.run) if record["kind"] == "progress"]
        return sum(max(last - step + 1, 0) for last, step in pairwise(steps))

    def stops(self) -> int:
        """How often all of the job stopped."""
        return sum(start["status"] == "stopped" for start in self.summary["starts"])

    def leaves(self, times: int) -> None:
        """Waits until machine 0 was to leave so often."""
        printed = self._folder / f"slurm-{self.number}.out"
        within(LIMIT_S, lambda: printed.read_text().count("node/0 - leaving") >= times, "no SIGTERM", lambda: True)

    def worker(self) -> psutil.Process:
        """A worker's process."""
        return next(psutil.Process(member["pid"]) for member in self.run.member_list() if member["role"] == "worker")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.chaos)], ids=["first", "second"])
def test_a_job_outlives_a_machine_that_is_switched_off(cluster: Slurm, golden: Golden, rank: int) -> None:
    assert sorted(cluster.run("srun", "--nodes=3", "hostname").split()) == ["x1", "x2", "x3"]
    job = Training(cluster, f"off-{rank}", lease_s=30.0)
    job.submit()
    job.train(1)
    lost, other = (cluster.nodes[cluster.job(job.number).hosts[each]] for each in (rank, 1 - rank))
    address = job.run.address()
    with stalled(worker_on(other, job.run)):  # or the job might end first
        lost.off()
    done = job.end(golden)
    assert done.restarts >= 1 and lost.name not in done.hosts and job.run.address() != address
    lost.on()
    cluster.start_node(lost)
    assert len(job.summary["starts"]) == 1, "not taken over"
    assert [recovery["lost_steps"] for recovery in job.summary["recoveries"]] == [0] * len(job.summary["recoveries"])


@pytest.mark.chaos
def test_a_job_continues_after_a_requeue_after_its_time_limit_and_after_it_is_cancelled(
    cluster: Slurm, golden: Golden
) -> None:
    job = Training(cluster, "continued", lease_s=60.0)
    job.submit("--signal=TERM@120")
    job.train(40)
    cluster.run("scontrol", "requeue", job.number)
    job.train(100)
    with stalled(job.worker()):  # or the job ends first: Slurm looks at time limits every 30 s
        cluster.limit(job.number, cluster.job(job.number).minutes + 2)
        job.leaves(2)
    within(LIMIT_S, lambda: cluster.job(job.number).restarts == 2, "not in the queue again", lambda: True)
    cluster.limit(job.number, 60)
    job.train(200)
    cluster.run("scancel", job.number)
    assert cluster.wait(job.number, "CANCELLED").restarts == 2
    job.submit()
    assert job.end(golden).restarts == 0
    assert not job.trained_again() and job.stops() == 3
