"""Jobs that were killed, stopped or done and go on, by `--continue` or `--resume`: they end with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

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


@pytest.mark.chaos
@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM"])
def test_a_job_of_roles_by_hand_that_was_killed_or_stopped_by_an_engine_goes_on_where_it_was(
    cluster: Cluster, run: RunReader, golden: Golden, by: str
) -> None:
    where = ("--coordinator", str(run.path), "--run-dir", str(run.path.parent))
    hurts, stop = cluster.folder("hurts"), Hurt("worker 1", "pushing", 120, "SIGSTOP", silent=False)
    held = {"env": environment(hurts, [stop]), "main": MAIN}
    first = lead(cluster)
    members = [cluster.command(role, *where, "--index", str(index), **held) for role, index in ROLES]
    within(200, lambda: not missed(hurts, [stop]), "no step 60", lambda: first.running)
    if by == "SIGKILL":
        everything = [command.process for command in (first, *members)]
        kill(everything)
        assert not gone(everything, limit_s=20)
    else:
        first.signal(signal.SIGTERM)
        members[-1].signal(signal.SIGCONT)
        assert first.end().code == 143 and {command.end().code for command in members} == {1}
    stopped = run.summary() or {}
    second = lead(cluster)
    members = [cluster.command(role, *where, "--index", str(index)) for role, index in ROLES]
    assert [command.end().code for command in (second, *members)] == [0] * 5, second.printed()
    summary = run.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert sum(recovery["lost_steps"] for recovery in summary["recoveries"]) == 0
    if by == "SIGKILL":
        assert len(summary["starts"]) == 1
    else:
        assert stopped["stopped_by"] == TERMINATED
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
    kill([job.process, *members.values()])
    assert not gone(members.values(), limit_s=90)
    kept = found.latest()
    assert kept is not None and 0 < kept.step < STEPS and kept.base is not None  # an increment
    ended = cluster.command("train", "--resume", str(folder.path), "--set", "servers=1", fresh=True).end()
    assert (ended.code, ended.err) == (0, "")
    assert f"at step {kept.step} from step-{kept.step:08d}; changed: servers=1\n" in ended.out
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", STEPS, 100 * STEPS)
    assert summary["state_digest"] == golden.summary["state_digest"]
    assert [r for r in records(folder) if r["kind"] == "event" and "resumed at step" in str(r.get("text"))]


def test_a_job_that_is_done_is_neither_resumed_nor_scaled(golden: Golden) -> None:
    before, run = golden.summary, str(golden.folder.path)
    again = CliRunner().invoke(app, ["train", "--resume", run])
    text = f"--resume {run}: the job is done at step {STEPS}; raise train.epochs or train.max_steps"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", f"error: {text}\n")
    scaled = CliRunner().invoke(app, ["scale", run, "--workers", "2"])
    assert scaled.exit_code == 1 and "no job runs here; use shardkeep train --resume" in scaled.stderr
    assert golden.summary == before
