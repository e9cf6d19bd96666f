"""`shardkeep stop` and `shardkeep scale` of running jobs, SIGTERM in place of stop, and jobs that resume.

Refusals of who asks: tests/launch/test_stop.py. Roles by hand that continue: tests/roles/test_continue.py.
"""

from __future__ import annotations

import re
import shlex
import signal

import pytest
from typer.testing import CliRunner

from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.run.folder import RunFolder
from tests.support.cluster import Cluster, Command, gone, kinds, within
from tests.support.configs import LASTING
from tests.support.golden import STEPS, TRAINED, Golden
from tests.support.hurt import MAIN, Hurt, environment, missed

pytestmark = pytest.mark.waits_for_processes
SAVED = r"stopped at step (\d+): shardkeep stop\ncheckpoint: step \1\nto resume at step \1: (.*)\n"


def stopped(stop: Command, folder: RunFolder) -> tuple[int, list[str]]:
    """The step where a job stopped, which has a checkpoint, and the command that resumes it."""
    ended = stop.end()
    assert (ended.code, ended.err) == (0, ""), ended
    found = re.fullmatch(SAVED, ended.out.replace(",", ""))
    assert found is not None, ended.out
    assert (folder.summary() or {})["status"] == "stopped"
    assert Checkpoints(folder.path / "checkpoints").complete()[-1][0] == int(found[1])
    return int(found[1]), shlex.split(found[2])


def test_a_job_in_one_process_stops_with_a_checkpoint_and_a_second_stop_says_so(cluster: Cluster) -> None:
    job, folder = cluster.job({**LASTING, "servers": 0, "workers": 1})
    within(100, lambda: "progress" in kinds(folder), "no step", lambda: job.running)
    step, resume = stopped(cluster.command("stop", str(folder.path)), folder)
    ended = job.end()
    assert (ended.code, ended.err) == (1, f"stopped at step {step}: shardkeep stop\n"), job.printed()
    assert resume == ["shardkeep", "train", "--resume", str(folder.path)]
    assert not (folder.path / "stop.json").exists()
    again = cluster.command("stop", str(folder.path)).end()
    text = f"error: {folder.path}: no job runs here; it stopped at step {step}: shardkeep stop\n"
    assert (again.code, again.out, again.err) == (1, "", text)


@pytest.mark.group("stopped twice")
@pytest.mark.slow
def test_a_job_of_processes_that_was_stopped_twice_ends_with_the_bits_of_an_undisturbed_one(
    cluster: Cluster, golden: Golden
) -> None:
    """Each time a worker is held 30 steps later, until the coordinator has the request."""
    folder = RunFolder(cluster.folder("stopped") / "run")
    starts = (str(cluster.write(TRAINED)), "--run-dir", str(folder.path)), ("--resume", str(folder.path))
    for start, by in zip(starts, ("stop", "SIGTERM"), strict=True):
        hurts, hold = cluster.folder(by), Hurt("worker 1", "pushing", 60, "SIGSTOP", silent=False)
        job = cluster.command("train", *start, env=environment(hurts, [hold]), main=MAIN)
        within(200, lambda: not missed(hurts, [hold]), "not held", lambda: job.running)  # noqa: B023
        members = cluster.training(folder)
        if by == "stop":
            asked = cluster.command("stop", str(folder.path))
        else:
            job.signal(signal.SIGTERM)
        coordinator = folder.endpoint()
        assert coordinator is not None
        stopping = lambda: fetch_status(coordinator).state == "stopping"  # noqa: B023, E731
        within(100, stopping, "the job does not stop", lambda: job.running)  # noqa: B023
        members["worker 1"].resume()
        if by == "stop":
            step, _ = stopped(asked, folder)
            assert 0 < step < STEPS
        ended = job.end()
        assert ended.code == 1 and ended.err.startswith("stopped at step "), job.printed()
        assert ended.err.count("\n") == 1, job.printed()
        assert not gone(members.values(), limit_s=0)
    assert cluster.command("train", "--resume", str(folder.path)).end().code == 0
    assert (folder.summary() or {})["state_digest"] == golden.summary["state_digest"]


@pytest.mark.slow  # with stand-ins: tests/launch/test_supervised_stops.py
def test_a_running_job_is_scaled_up_and_down_and_loses_no_sample(cluster: Cluster) -> None:
    train = {"batch_size": 50, "report_every_s": 0.05, "epochs": 6}
    job, folder = cluster.job({**TRAINED, "train": train}, name="scaled")
    cluster.training(folder)
    asked = cluster.command("scale", str(folder.path), "--servers", "1", "--workers", "3").end()
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == "the job stops with a checkpoint and resumes with workers=3, servers=1\n"
    ended = job.end()
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert "; changed: servers=1, workers=3\n" in ended.out
    summary = folder.summary() or {}
    assert (summary["status"], summary["samples"]) == ("completed", 120_000)
    assert {(p["role"], p["index"]) for p in summary["processes"]} >= {("worker", 2), ("server", 0)}


def test_a_job_that_is_done_is_neither_resumed_nor_scaled(golden: Golden) -> None:
    before, run = golden.summary, str(golden.folder.path)
    again = CliRunner().invoke(app, ["train", "--resume", run])
    text = f"--resume {run}: the job is done at step {STEPS}; raise train.epochs or train.max_steps"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", f"error: {text}\n")
    scaled = CliRunner().invoke(app, ["scale", run, "--workers", "2"])
    assert scaled.exit_code == 1 and "no job runs here; use shardkeep train --resume" in scaled.stderr
    assert golden.summary == before
