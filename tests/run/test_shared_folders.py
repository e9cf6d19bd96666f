"""Run folders where others could have put something: nobody believes what is there, and nothing is made there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import atomic_write
from shardkeep.config import parse_config
from shardkeep.launch.out_folder import holding
from shardkeep.launch.stopping import scale
from shardkeep.member.access import endpoint_of
from shardkeep.member.recovery_folder import kept_for_recovery
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin.resume import plan_resume
from shardkeep.trust.endpoint import make_token
from shardkeep.trust.tokens import keep_token
from tests.support.cases import every
from tests.support.owners import make_foreign

CONFIG = parse_config("{servers: 1, workers: 1, checkpoint: {every_steps: 5}}")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def running(path: Path) -> RunFolder:
    folder = RunFolder.create(path, CONFIG)
    folder.coordinator("127.0.0.1:7", pid=1)
    keep_token(folder.path)
    return folder


USES: dict[str, Callable[[Path], object]] = {
    "a member": lambda run: endpoint_of(str(run)),
    "the launcher and status": lambda run: RunFolder(run).endpoint(),
    "resume": plan_resume,
    "scale": lambda run: scale.ask(run, workers=2, servers=None),
    "a new run": lambda run: RunFolder.create(run.parent / "new", CONFIG),
    "a replacement": lambda run: kept_for_recovery(run, "job", "worker", 0),
    "a sweep": lambda run: holding(run, what="sweep").__enter__(),
}


@every("use", USES)
@every("mode", [0o777, 0o775], ids=["all", "a group"])
def test_below_a_folder_that_others_can_write_nothing_is_believed_or_made(tmp_path: Path, use: str, mode: int) -> None:
    folder = running(tmp_path / "scratch" / "run")
    scratch = folder.path.parent
    scratch.chmod(mode)
    if os.geteuid() == 0:
        os.chown(scratch, -1, 54_321)
    elif mode == 0o775:
        return  # only root can give files to another group
    before = sorted(scratch.rglob("*"))
    with pytest.raises(ConfigError, match=rf"{scratch} can be written by other users \(mode 0{mode:o}\)") as refused:
        USES[use](folder.path)
    assert "\n" not in str(refused.value) and "trusted-folders" in str(refused.value)
    assert sorted(scratch.rglob("*")) == before


@every("name", ["config.yaml", "code.json", "coordinator.json", "standing.json"])
@every("use", ["a member", "the launcher and status", "resume", "scale"])
def test_a_file_of_another_user_is_not_believed(
    tmp_path: Path, use: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = running(tmp_path / "run").path / name
    path.touch()
    make_foreign(path, monkeypatch)
    with pytest.raises(ConfigError, match=r"belongs to another user|is not here"):
        USES[use](path.parent)


def test_with_a_token_file_the_folder_may_be_anybodys_as_the_coordinator_proves_itself(tmp_path: Path) -> None:
    folder, token = running(tmp_path / "scratch" / "run"), tmp_path / "token"
    folder.path.parent.chmod(0o777)
    atomic_write(token, make_token(), private=True)
    assert endpoint_of(str(folder.path), token_file=token).address == "127.0.0.1:7"
    endpoint = RunFolder(folder.path).endpoint(token)
    assert endpoint is not None and endpoint.address == "127.0.0.1:7"


def test_what_a_job_makes_nobody_else_can_write_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RunFolder.create(tmp_path / "runs" / "first", CONFIG, code_folder=tmp_path)
        folder.coordinator("127.0.0.1:7", pid=1)
        kept_for_recovery(folder.path, "job", "worker", 0)
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "runs").rglob("*") if path.is_dir() or path.suffix in (".json", ".yaml")]
    assert len(made) > 5
    assert not [path for path in made if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
