"""What killed jobs left behind: what the next job removes of it, and which processes of a run count as still there.

In containers and over hosts, the number of a process says little.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardkeep.base.machine.pids import start_of
from shardkeep.config import JobConfig
from shardkeep.member.recovery_folder import kept_for_recovery
from shardkeep.ps.control.records import Member
from shardkeep.run.folder import RunFolder
from shardkeep.run.leftovers import GONE_S, clean, note_run
from shardkeep.run.processes import living
from shardkeep.trust.tokens import keep_token
from tests.support.cases import every

NOBODY = 2**22 + 1
"""A number that no process has (PID_MAX_LIMIT)."""


@pytest.fixture
def other() -> Iterator[int]:
    command = [sys.executable, "-c", "input()", "shardkeep"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shardkeep" / "tokens"


def killed(path: Path, *, launched: bool = True, pid: int = NOBODY, pid_space: str | None = None) -> RunFolder:
    """A run whose coordinator, process `pid`, did not end in order."""
    folder = RunFolder.create(path, JobConfig())
    keep_token(folder.path)
    note_run(folder.path)
    note = folder.token_path.with_suffix(".run")
    facts = json.loads(note.read_text())
    own = {"pid": pid, "started": start_of(pid), "pid_space": pid_space or facts["pid_space"]}
    note.write_text(json.dumps(facts | own))
    kept_for_recovery(folder.path, "job", "server", 0)
    if launched:
        with folder.held():
            pass
    return folder


def test_of_a_job_whose_launcher_was_killed_neither_token_nor_recovery_stays(tmp_path: Path, tokens: Path) -> None:
    folder = killed(tmp_path / "run")
    damaged = {"a": "", "b": "[]", "c": '{"host": 1}'}  # notes that hinder nobody
    for name, text in damaged.items():
        (tokens / f"{name}.run").write_text(text)
    clean(tokens)
    assert not folder.token_path.exists() and not (folder.path / "recovery").exists()
    killed(tmp_path / "in order").forget_token()
    assert {path.stem for path in tokens.iterdir()} <= set(damaged)


@every(
    ("missing", "age_s", "stays"),
    [("a/run", 2 * GONE_S, False), ("a/run", 0.0, True), ("a/run/config.yaml", 0.0, True), ("a", 2 * GONE_S, True)],
    ids=["deleted", "gone since now", "empty since now", "its volume, too"],
)
def test_the_token_of_a_run_folder_that_is_missing_goes_after_days_if_the_folder_above_is_there(
    missing: str, age_s: float, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tokens = tmp_path / "state" / "shardkeep" / "tokens"
    token = killed(tmp_path / "a" / "run", launched=False).token_path
    then = time.time() - age_s
    os.utime(token.with_suffix(".run"), (then, then))
    gone = tmp_path / missing
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    clean(tokens)
    assert [path.name for path in sorted(tokens.iterdir())] == ([token.name, f"{token.name}.run"] if stays else [])


def test_nothing_goes_that_a_process_or_another_coordinator_may_need(tmp_path: Path, tokens: Path, other: int) -> None:
    held, manned = killed(tmp_path / "held", launched=False), killed(tmp_path / "manned")
    manned.coordinator("127.0.0.1:7", pid=other)
    folders = [
        killed(tmp_path / "by hand", launched=False),
        killed(tmp_path / "elsewhere", pid_space="another"),
        killed(tmp_path / "starting", pid=other),
        held,
        manned,
    ]
    with held.held():
        clean(tokens)
    for folder in folders:
        assert folder.token_path.exists() and (folder.path / "recovery").exists(), folder.path.name


# ---- processes that count as still there ----


def run_of(path: Path, pid: int, *, host: str = "127.0.0.1") -> RunFolder:
    """A run whose coordinator is here, and a server on `host`, with this number."""
    folder = RunFolder.create(path / "run", JobConfig())
    folder.coordinator("127.0.0.1:7", pid=pid)
    folder.members(1, [Member("server", 0, host, pid, start_of(pid))])
    return folder


def roles(folder: RunFolder) -> list[str]:
    return [found["role"] for found in living(folder)]


@every("pid", [os.getpid(), os.getppid()], ids=["itself", "the one above"])
def test_a_process_does_not_take_itself_for_a_leftover(tmp_path: Path, pid: int) -> None:
    assert roles(run_of(tmp_path, pid)) == []


@every(
    ("host", "there"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("10.9.0.1", True), ("10.9.0.2", False)],
    ids=["here", "Debian's", "ours", "elsewhere"],
)
def test_a_member_is_there_only_if_its_host_is_this_machine(
    tmp_path: Path, other: int, host: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [SimpleNamespace(family=socket.AF_INET, address="10.9.0.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    assert ("server" in roles(run_of(tmp_path, other, host=host))) == there


@every(
    ("change", "there"), [({}, True), ({"pid_space": "another"}, False), ({"pid_space": ""}, True)],
    ids=["here", "another container", "of an earlier version"],
)  # fmt: skip
def test_numbers_of_another_machine_or_container_name_no_process_here(
    tmp_path: Path, other: int, change: dict[str, str], there: bool
) -> None:
    folder = run_of(tmp_path, other)
    path = folder.path / "coordinator.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert roles(folder) == (["server", "coordinator"] if there else [])


def test_another_process_of_the_same_number_is_none_of_the_run_whatever_its_command(tmp_path: Path, other: int) -> None:
    """As after a restart of the machine, or when the numbers have gone round."""
    folder = run_of(tmp_path, other)
    for name in ("coordinator.json", "members.json"):
        path = folder.path / name
        path.write_text(path.read_text().replace(start_of(other), "1"))
    assert roles(folder) == []


def test_a_process_is_known_by_its_number_and_start_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_of(process.pid) == start_of(process.pid) != ""
        assert start_of(process.pid) != start_of(os.getpid())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_of(process.pid) == ""  # a zombie
    assert start_of(process.pid) == ""
