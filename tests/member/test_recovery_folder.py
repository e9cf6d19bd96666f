"""What members keep, for their replacements and in checkpoints: for how long, who else may write there, and where a
replacement finds it, from any folder, also while its predecessor is still there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import CheckpointError, ConfigError, JobError, PlaceRefused
from shardkeep.config import JobConfig, parse_config
from shardkeep.member import recovery_folder
from shardkeep.member.membership import Membership
from shardkeep.member.recovery_folder import kept_for_recovery, kept_while_useful, replaced_folder
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.records import Formation
from shardkeep.run.checkpoints import checkpoints_of, owned
from shardkeep.run.folder import RunFolder
from shardkeep.run.storage import (
    folder_to_keep_in,
    kept_at,
    missed,
    shared_folder,
    why_unseen,
    with_checkpoints,
)
from tests.support.cases import every
from tests.support.control_job import VERSIONS, Job
from tests.support.recovering import Recovering


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


# ---- where a replacement finds it ----


class Trial:
    """A formed job whose server 0 was started in `first`, kept files in `kept`, and has died."""

    def __init__(self, folder: Path, server: ControlServer, job: Recovering) -> None:
        self.job, self._server = job, server
        self.first, self.other = folder / "first", folder / "other"
        with self.client() as control:
            control.register()
            self.kept = self.first / "recovery" / control.job / "server-0"
            self.kept.mkdir(parents=True)
            for index in (0, 1):
                job.register("worker", index)
                job.join("worker", index)
            assert control.join(kept=kept_at(self.kept)).generation == 1
            job.kill("server", 0, pid=os.getpid())

    def client(self) -> ControlClient:
        return ControlClient(self._server.endpoint, role="server", index=0, timeout_s=5.0, versions=VERSIONS)

    def replacement(self) -> ControlClient:
        control = self.client()
        control.register()
        return control


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    job = Recovering(restarts=1, run_dir=str(tmp_path / "coordinators"))
    with ControlServer(job.coordinator) as server:
        yield Trial(tmp_path, server, job)


def test_a_replacement_goes_on_in_its_predecessors_folder_or_where_that_is_for_the_coordinator(trial: Trial) -> None:
    with trial.replacement() as control:
        there = trial.first.rename(trial.first.with_name("coordinators"))
        assert folder_to_keep_in(control, trial.other) == there
        there.rename(trial.first)
        assert replaced_folder(control, trial.other) == trial.kept
    assert not trial.other.exists()


def test_a_replacement_that_does_not_find_the_folder_keeps_in_its_own_and_names_the_other(trial: Trial) -> None:
    trial.kept.rename(trial.kept.with_name("moved"))
    with trial.replacement() as control:
        assert folder_to_keep_in(control, trial.other) == trial.other
        place = f"{trial.kept} on {os.uname().nodename}"
        assert missed(control, "its journal") == f"server 0 came back without its journal, which was kept in {place}"


def test_a_replacement_that_may_not_use_the_folder_is_refused_and_the_job_waits_for_another(trial: Trial) -> None:
    (trial.kept / "owner").mkdir()  # no process can lock it
    control = trial.client()
    why = rf"server 0 cannot be replaced by this process: {trial.kept}: cannot be used"
    with pytest.raises(PlaceRefused, match=why), kept_while_useful(control, trial.other), Membership(control):
        replaced_folder(control, trial.other)
    assert trial.job.state.state == "recovering" and trial.kept.is_dir()
    (trial.kept / "owner").rmdir()
    with trial.replacement() as another:
        assert replaced_folder(another, trial.other) == trial.kept


def test_a_folder_of_another_user_is_named_with_what_to_do(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != str(trial.kept))  # root may do all
    why = rf"{trial.kept} has what the one before it kept.* start it as the user of"
    with trial.replacement() as control, pytest.raises(PlaceRefused, match=why):
        folder_to_keep_in(control, trial.other)


# ---- a predecessor that is still there ----

HOLD = """
import sys, time
from pathlib import Path
from shardkeep.member.recovery_folder import kept_for_recovery
kept_for_recovery(Path(sys.argv[1]), "job", "server", 0)
print("held", flush=True)
time.sleep(60)
"""


def test_a_predecessor_that_stands_still_is_killed_and_another_process_of_the_number_in_the_lock_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on shared storage, where the holder is on another machine."""
    monkeypatch.setattr(recovery_folder, "OWNER_S", 0.2)
    arguments: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **arguments) as holder,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        owner = tmp_path / "recovery" / "job" / "server-0" / "owner"
        number = owner.read_text()
        owner.write_text(f"{other.pid}\n")
        with pytest.raises(CheckpointError, match=rf"process {other.pid} still holds the lock after 0.2 s"):
            kept_for_recovery(tmp_path, "job", "server", 0)
        assert other.poll() is None and holder.poll() is None
        other.kill()
        owner.write_text(number)
        holder.send_signal(signal.SIGSTOP)
        kept_for_recovery(tmp_path, "job", "server", 0)
        assert holder.wait(90) == -signal.SIGKILL
        assert owner.read_text() == f"{os.getpid()}\n"


# ---- the coordinator's folder for checkpoints ----

OFF = "{checkpoint: {every_steps: off}}"
NOT_FORMED = {"formation": None}


@every(
    ("settings", "start_step", "standing", "needed_by"),
    [
        ("servers: 2", 0, None, ""),
        ("{checkpoint: {every_steps: 20}}", 0, None, "checkpoint.every_steps: 20"),
        (OFF, 30, None, "--start-step 30"),
        (OFF, 0, None, "proof of journals"),
        ("{checkpoint: {dir: /shared}}", 0, None, "proof of journals"),
        ("{checkpoint: {dir: /shared}, recovery: {journal: os}}", 0, None, None),
        ("{checkpoint: {dir: /shared}, recovery: {restarts: 0}}", 0, None, None),
        ("servers: 2", 0, NOT_FORMED, ""),
        ("servers: 2", 0, {"formation": {}}, None),
        (OFF, 0, NOT_FORMED | {"origin": 30}, "--start-step 30"),
        (OFF, 0, NOT_FORMED | {"origin": 0}, "proof of journals"),
    ],
)
def test_the_coordinator_offers_its_run_folder_where_the_config_names_none_also_at_a_take_over(
    settings: str, start_step: int, standing: Any, needed_by: str | None, tmp_path: Path
) -> None:
    shared = shared_folder(parse_config(settings), tmp_path, start_step=start_step, standing=standing)
    told = None if shared is None else "proof of journals" if shared.proof_only else shared.needed_by
    assert told == needed_by
    assert why_unseen(shared, writes=True) == ""
    (alias := tmp_path / "alias").symlink_to(tmp_path)
    homes = [
        home for home in (tmp_path, alias, tmp_path.parent) if kept_at(home / "recovery/J/server-0", shared).shared
    ]
    assert homes == ([] if shared is None else [tmp_path, alias])


@every("damage", [None, "", "x" * 16], ids=["gone", "empty", "no number"])
def test_a_take_over_offers_the_folder_that_members_know_and_signs_one_whose_number_is_lost(
    damage: str | None, tmp_path: Path
) -> None:
    config = parse_config("servers: 2")
    before = shared_folder(config, tmp_path, start_step=0)
    assert before is not None and shared_folder(config, tmp_path, start_step=0, standing=NOT_FORMED) == before
    (probe,) = Path(before.folder).iterdir()
    probe.unlink() if damage is None else probe.write_text(damage)
    after = shared_folder(config, tmp_path, start_step=0, standing=NOT_FORMED)
    assert after is not None and len(after.token) == 16
    assert why_unseen(after, writes=True) == ""


def test_a_member_says_why_it_cannot_use_the_folder(tmp_path: Path) -> None:
    shared = shared_folder(parse_config("servers: 2"), tmp_path, start_step=0)
    assert shared is not None
    folder = Path(shared.folder)
    shared_folder(parse_config("servers: 2"), tmp_path, start_step=0)  # of another machine, at the same path
    assert f"{folder} is another folder" in why_unseen(shared, writes=False)
    folder.rename(tmp_path / "elsewhere")
    assert why_unseen(shared, writes=False).endswith(f"{folder}: no such file or directory")


@every(
    ("checkpoints", "settled"),
    [(None, (None, "auto")), ("/run/checkpoints", ("/run/checkpoints", "auto")), ("", (None, "off"))],
)
def test_members_use_what_the_formation_has_settled(checkpoints: str | None, settled: tuple[Any, Any]) -> None:
    formation = Formation(1, "127.0.0.1", 1, (), (), checkpoints=checkpoints)
    found = with_checkpoints(parse_config("servers: 2"), formation).checkpoint
    assert (found.dir, found.every_steps) == settled
