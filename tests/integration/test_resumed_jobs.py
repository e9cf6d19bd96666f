"""Whole jobs that were killed, stopped or done, and are resumed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from tests.support.cluster import Cluster, gone, records
from tests.support.golden import STEPS, TRAINED, Golden


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_a_job_of_which_every_process_was_killed_goes_on_to_the_same_model(
    cluster: Cluster, tmp_path: Path, golden: Golden
) -> None:
    """The golden job is profiled and uses sockets, this one not: that changes no bit either."""
    config = {**TRAINED, "checkpoint": {**TRAINED["checkpoint"], "full_every": 20}}
    job, folder = cluster.job(config, name="killed")
    members = cluster.training(folder)
    found = Checkpoints(folder.path / "checkpoints")
    deadline = Deadline(60.0)
    while len(found.complete()) < 2:  # the second is an increment; what the job prints comes late on a busy machine
        deadline.check("two checkpoints")
        time.sleep(0.01)
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
    text = f"--resume {golden.folder.path}: the job is done at step 400; raise train.epochs or train.max_steps"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", f"error: {text}\n")
    assert golden.summary == before


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_ctrl_c_leaves_a_checkpoint_of_the_step_it_stopped_at(cluster: Cluster, golden: Golden) -> None:
    job, folder = cluster.job({**TRAINED, "checkpoint": {"every_steps": 1_000_000}}, name="stopped")
    cluster.training(folder)
    job.signal(signal.SIGINT)
    ended = job.end()
    step = int(ended.err.split("stopped at step ")[1].split(":")[0])
    kept = Checkpoints(folder.path / "checkpoints").latest()
    assert kept is not None and kept.step == step > 0
    assert cluster.command("train", "--resume", str(folder.path)).end().code == 0
    assert (folder.summary() or {})["state_digest"] == golden.summary["state_digest"]
