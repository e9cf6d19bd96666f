"""Jobs that were killed, stopped or done and go on, by `--continue` or `--resume`: they end with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardkeep.base.errors import ConfigError
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from shardkeep.ps.control.records import TERMINATED
from shardkeep.run.reader import RunReader
from tests.support.cluster import Cluster, Command, gone, kill, records, within
from tests.support.golden import STEPS, TRAINED, Golden
from tests.support.hurt import MAIN, Hurt, environment, missed

pytestmark = pytest.mark.waits_for_processes
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


@pytest.mark.chaos
def test_a_job_of_which_everything_was_killed_loses_no_step(cluster: Cluster, run: RunReader, golden: Golden) -> None:
    first = lead(cluster)
    members = held(cluster, run, first)
    everything = [command.process for command in (first, *members)]
    kill(everything)
    assert not gone(everything, limit_s=20)
    second = lead(cluster)
    summary = completed(run, golden, second, *join(cluster, run))
    assert len(summary["starts"]) == 1 and sum(recovery["lost_steps"] for recovery in summary["recoveries"]) == 0


@pytest.mark.chaos
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


@pytest.mark.chaos
def test_a_job_of_which_every_process_was_killed_goes_on_to_the_same_model(
    cluster: Cluster, tmp_path: Path, golden: Golden
) -> None:
    """The golden job is profiled and uses sockets, this one not: that changes no bit either."""
    config = {**TRAINED, "checkpoint": {**TRAINED["checkpoint"], "full_every": 20}}
    stop = Hurt("worker 1", "pushing", 240, "SIGSTOP", silent=False)  # at step 120
    job, folder = cluster.job(config, name="killed", env=environment(tmp_path, [stop]), main=MAIN)
    found = Checkpoints(folder.path / "checkpoints")
    within(200, lambda: not missed(tmp_path, [stop]), "no step 120", lambda: job.running)
    within(200, lambda: len(found.complete()) >= 2, "no second checkpoint, an increment", lambda: job.running)
    members = cluster.training(folder)
    with pytest.raises(ConfigError, match=rf"belongs to another job that runs \(run folder {folder.path}, process "):
        Hold(found.folder, owner_here("other", str(tmp_path / "other")))
    for process in (job.process, *members.values()):
        process.send_signal(signal.SIGKILL)
    assert not gone(members.values(), limit_s=90)
    kept = found.latest()
    assert kept is not None and 0 < kept.step < STEPS
    assert kept.base is not None  # an increment
    ended = cluster.command("train", "--resume", str(folder.path), "--set", "servers=1", fresh=True).end()
    assert (ended.code, ended.err) == (0, "")
    assert f"at step {kept.step} from step-{kept.step:08d}; changed: servers=1\n" in ended.out
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", STEPS, 100 * STEPS)
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert [r for r in records(folder) if r["kind"] == "event" and "resumed at step" in str(r.get("text"))]


def test_a_job_that_is_done_is_not_resumed(golden: Golden) -> None:
    before = golden.summary
    again = CliRunner().invoke(app, ["train", "--resume", str(golden.folder.path)])
    text = f"--resume {golden.folder.path}: the job is done at step {STEPS}; raise train.epochs or train.max_steps"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", f"error: {text}\n")
    assert golden.summary == before
