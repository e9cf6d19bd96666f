"""Whole jobs that were killed, stopped or done, and are resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardkeep.base.errors import ConfigError
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from tests.support.cluster import Cluster, gone, records, within
from tests.support.golden import STEPS, TRAINED, Golden
from tests.support.hurt import MAIN, Hurt, environment, missed


@pytest.mark.chaos
@pytest.mark.waits_for_processes
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


@pytest.mark.waits_for_processes
def test_a_job_that_is_done_is_not_resumed(golden: Golden) -> None:
    before = golden.summary
    again = CliRunner().invoke(app, ["train", "--resume", str(golden.folder.path)])
    text = f"--resume {golden.folder.path}: the job is done at step {STEPS}; raise train.epochs or train.max_steps"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", f"error: {text}\n")
    assert golden.summary == before
