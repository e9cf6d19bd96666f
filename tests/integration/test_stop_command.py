"""`shardkeep stop` of running jobs, and SIGTERM in its place. Refusals: tests/launch/test_stop.py."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.run.folder import RunFolder
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import make_token
from tests.support.cluster import Cluster, Command, gone, records, within
from tests.support.configs import LASTING
from tests.support.golden import STEPS, TRAINED, Golden

pytestmark = pytest.mark.waits_for_processes
ALONE = {**LASTING, "servers": 0, "workers": 1}
SAVED = r"stopped at step (\d+): shardkeep stop\ncheckpoint: step \1\nto resume at step \1: (.*)\n"


def begun(folder: RunFolder, job: Command) -> None:
    within(100, lambda: any(r["kind"] == "progress" for r in records(folder)), "no step", lambda: job.running)


def resumed(cluster: Cluster, folder: RunFolder) -> Command:
    """The stopped job, once it trains again."""

    def steps() -> int:
        return sum(record["kind"] == "progress" for record in records(folder))

    before = steps()
    job = cluster.command("train", "--resume", str(folder.path))
    within(100, lambda: steps() > before, "no step", lambda: job.running)
    return job


def newest(folder: RunFolder) -> int:
    """The step of the newest complete checkpoint."""
    return Checkpoints(folder.path / "checkpoints").complete()[-1][0]


def stopped(cluster: Cluster, folder: RunFolder, *arguments: str) -> tuple[int, list[str]]:
    """Stops the job; the step where it stopped, which has a checkpoint, and the command that resumes it."""
    ended = cluster.command("stop", str(folder.path), *arguments).end()
    assert (ended.code, ended.err) == (0, ""), ended
    found = re.fullmatch(SAVED, ended.out.replace(",", ""))
    assert found is not None, ended.out
    assert (folder.summary() or {})["status"] == "stopped"
    assert newest(folder) == int(found[1])
    return int(found[1]), shlex.split(found[2])


def test_a_job_in_one_process_stops_with_a_checkpoint_and_a_second_stop_says_so(cluster: Cluster) -> None:
    job, folder = cluster.job(ALONE)
    begun(folder, job)
    step, resume = stopped(cluster, folder)
    ended = job.end()
    assert (ended.code, ended.err) == (1, f"stopped at step {step}: shardkeep stop\n"), job.printed()
    assert resume == ["shardkeep", "train", "--resume", str(folder.path)]
    assert not (folder.path / "stop.json").exists()
    again = cluster.command("stop", str(folder.path)).end()
    text = f"error: {folder.path}: no job runs here; it stopped at step {step}: shardkeep stop\n"
    assert (again.code, again.out, again.err) == (1, "", text)


@pytest.mark.slow
def test_a_job_of_processes_that_was_stopped_twice_ends_with_the_bits_of_an_undisturbed_one(
    cluster: Cluster, golden: Golden
) -> None:
    job, folder = cluster.job(TRAINED)
    for by in ("stop", "SIGTERM"):
        members = cluster.training(folder)
        if by == "stop":
            step, _ = stopped(cluster, folder)
            assert 0 < step < STEPS
        else:
            job.signal(signal.SIGTERM)
        ended = job.end()
        assert ended.code == 1 and ended.err.startswith("stopped at step "), job.printed()
        assert ended.err.count("\n") == 1, job.printed()
        assert not gone(members.values(), limit_s=0)
        job = resumed(cluster, folder)
    assert job.end().code == 0
    assert (folder.summary() or {})["state_digest"] == golden.summary["state_digest"]


@pytest.mark.chaos
def test_roles_by_hand_are_stopped_over_tls_with_a_token_file(cluster: Cluster, tmp_path: Path) -> None:
    (here,) = make_certs(tmp_path / "tls", [LOCAL], days=2)
    token = tmp_path / "secret"
    atomic_write(token, make_token(), private=True)
    trust = ("--token-file", str(token), "--tls", str(here))
    config: dict[str, Any] = {**LASTING, "servers": 1, "workers": 1}
    coordinator, address, folder = cluster.coordinator(config, trust=trust)
    where = ("--coordinator", address, "--index", "0", "--run-dir", str(tmp_path))
    members = [cluster.command(role, *where, *trust) for role in ("server", "worker")]
    cluster.training(folder)
    refused = cluster.command("stop", str(folder.path), "--token-file", str(token)).end()
    text = f"error: the coordinator at {address} uses TLS: add --tls {here}\n"
    assert (refused.code, refused.out, refused.err) == (2, "", text)
    _, resume = stopped(cluster, folder, *trust)
    assert [command.running for command in (coordinator, *members)] == [False] * 3
    assert [command.end().code for command in (coordinator, *members)] == [1] * 3
    assert resume[:2] == ["shardkeep", "coordinator"] and "--continue" in resume


@pytest.mark.chaos
def test_roles_by_hand_are_stopped_by_the_address_of_their_coordinator(cluster: Cluster) -> None:
    coordinator, address, folder = cluster.coordinator({**LASTING, "workers": 1})
    members = [cluster.role(role, 0, address) for role in ("server", "worker")]
    cluster.training(folder)
    ended = cluster.command("stop", "--coordinator", address, "--token-file", str(folder.token_path)).end()
    assert ended.code == 0, ended.err
    found = re.fullmatch(SAVED, ended.out.replace(",", ""))
    assert found is not None, ended.out
    assert [command.end().code for command in (coordinator, *members)] == [1] * 3
    assert newest(folder) == int(found[1])


@pytest.mark.chaos
def test_a_job_that_does_not_stop_in_time_is_said_to_stop_still(cluster: Cluster) -> None:
    job, folder = cluster.job(LASTING)
    members = cluster.training(folder)
    members["worker 0"].suspend()
    late = cluster.command("stop", str(folder.path), "--timeout", "0.5").end()
    members["worker 0"].resume()
    text = "error: the job has not ended within 0.5 s (--timeout); it still stops, and the request stands\n"
    assert (late.code, late.out, late.err) == (1, "", text)
    assert job.end().code == 1
