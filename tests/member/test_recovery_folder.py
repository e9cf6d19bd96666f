"""What members keep, for their replacements and in checkpoints: for how long, and who else may write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError, JobError
from shardkeep.config import JobConfig, parse_config
from shardkeep.member.membership import Membership
from shardkeep.member.recovery_folder import kept_for_recovery, kept_while_useful
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.run.checkpoints import checkpoints_of, owned
from shardkeep.run.folder import RunFolder
from tests.support.cases import every
from tests.support.control_job import VERSIONS, Job


@every("silent", [False, True], ids=["it fails the job", "its coordinator is silent"])
def test_a_server_that_fails_leaves_only_what_another_coordinator_needs(tmp_path: Path, silent: bool) -> None:
    job = Job()
    server = ControlServer(job.coordinator).start()
    control = ControlClient(server.endpoint, role="server", index=0, timeout_s=1.0, versions=VERSIONS)
    with pytest.raises(JobError), kept_while_useful(control, tmp_path), Membership(control):
        kept = kept_for_recovery(tmp_path, control.job, "server", 0)
        if silent:
            server.stop()
        raise JobError("a disk is full")
    if silent:
        assert kept.is_dir()
    else:
        server.stop()
        assert job.state.state == "failed" and not (tmp_path / "recovery").exists()


def test_a_resumed_run_begins_without_what_the_killed_one_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    kept_for_recovery(folder.path, "job", "server", 0)
    RunFolder.reopen(folder.path, JobConfig())
    assert not (folder.path / "recovery").exists()


@every("named", [True, False], ids=["named", "left out"])
def test_no_other_job_writes_to_a_jobs_checkpoints_whether_or_not_its_config_names_the_folder(
    tmp_path: Path, named: bool
) -> None:
    run, place = tmp_path / "run", tmp_path / "run" / "checkpoints"
    other = parse_config(f"checkpoint: {{every_steps: 5, dir: {place}}}")
    config = other if named else parse_config("checkpoint: {every_steps: 5}")
    first = owned(checkpoints_of(config, run), config, run, "first")
    assert owned(first, config, run, "first") is first  # the next generation
    with pytest.raises(ConfigError, match=rf"{place} belongs to another job that runs \(run folder {run}, process "):
        owned(checkpoints_of(other, tmp_path / "other"), other, tmp_path / "other", "second")
    replaced = owned(checkpoints_of(config, run), config, run, "first")
    replaced.begin(5)
    first.release()
    replaced.release()
    owned(checkpoints_of(other, tmp_path / "other"), other, tmp_path / "other", "second").begin(5)


def test_a_job_without_checkpoints_holds_no_folder(tmp_path: Path) -> None:
    config = parse_config("checkpoint: {every_steps: off}")
    assert not owned(checkpoints_of(config, tmp_path), config, tmp_path, "job").owned
    assert not any(tmp_path.iterdir())
