"""Which processes of a run count as still there: in containers and over hosts, a number says little."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardkeep.base.machine.pids import start_of
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Member, Role
from shardkeep.run.folder import RunFolder
from shardkeep.run.processes import living
from tests.support.cases import every

LOCAL = "127.0.0.1:7"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", JobConfig())


@pytest.fixture
def role() -> Iterator[int]:
    """Another process; its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def member(role: Role, pid: int, *, host: str = "127.0.0.1", started: str | None = None) -> Member:
    return Member(role, 0, host, pid, start_of(pid) if started is None else started)


@every("pid", [os.getpid(), os.getppid()], ids=["itself", "the one above"])
def test_a_process_does_not_take_itself_for_a_leftover(folder: RunFolder, pid: int) -> None:
    folder.coordinator(LOCAL, pid=pid)
    folder.members(1, [member("server", pid), member("worker", pid)])
    assert living(folder) == []


@every(
    ("host", "there"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("10.9.0.1", True), ("10.9.0.2", False)],
    ids=["here", "Debian's", "ours", "elsewhere"],
)
def test_a_member_is_there_only_if_its_host_is_this_machine(
    folder: RunFolder, role: int, host: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [SimpleNamespace(family=socket.AF_INET, address="10.9.0.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    folder.members(1, [member("server", role, host=host)])
    assert [found["pid"] for found in living(folder)] == ([role] if there else [])


@every(
    ("change", "there"), [({}, True), ({"pid_space": "another"}, False), ({"pid_space": ""}, True)],
    ids=["here", "another container", "of an earlier version"],
)  # fmt: skip
def test_numbers_of_another_machine_or_container_name_no_process_here(
    folder: RunFolder, role: int, change: dict[str, str], there: bool
) -> None:
    folder.coordinator(LOCAL, pid=role)
    folder.members(1, [member("server", role)])
    path = folder.path / "coordinator.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [found["role"] for found in living(folder)] == (["server", "coordinator"] if there else [])


def test_another_process_of_the_same_number_is_none_of_the_run_whatever_its_command(folder: RunFolder) -> None:
    """As after a restart of the machine, or when the numbers have gone round."""
    with subprocess.Popen([sys.executable, "-c", "input()", "shardkeep"], stdin=subprocess.PIPE) as process:
        folder.coordinator(LOCAL, pid=process.pid)
        folder.members(1, [member("server", process.pid), member("worker", process.pid)])
        assert len(living(folder)) == 3
        for name in ("coordinator.json", "members.json"):
            path = folder.path / name
            path.write_text(path.read_text().replace(start_of(process.pid), "1"))
        assert living(folder) == []


def test_a_process_is_known_by_its_number_and_start_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_of(process.pid) == start_of(process.pid) != ""
        assert start_of(process.pid) != start_of(os.getpid())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_of(process.pid) == ""  # a zombie
    assert start_of(process.pid) == ""
