"""Which processes of a run count as still there: in containers and over hosts, a number says little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Member
from shardkeep.run.folder import RunFolder
from shardkeep.run.processes import living

LOCAL = "127.0.0.1:7"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Of a run; every process looks like one of shardkeep's."""
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["shardkeep"])
    return RunFolder.create(tmp_path / "run", JobConfig())


@pytest.fixture
def role() -> Iterator[int]:
    """Another process; its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["itself", "the one above"])
def test_a_process_does_not_take_itself_for_a_leftover(folder: RunFolder, pid: int) -> None:
    folder.coordinator(LOCAL, pid=pid)
    folder.members(1, [Member("server", 0, "127.0.0.1", pid), Member("worker", 0, "127.0.0.1", pid)])
    assert living(folder) == []


@pytest.mark.parametrize(
    ("host", "there"), [("127.0.0.1", True), ("0.0.0.0", True), ("192.0.2.7", False)], ids=["here", "ours", "elsewhere"]
)
def test_a_member_is_there_only_if_its_host_is_this_machine(
    folder: RunFolder, role: int, host: str, there: bool
) -> None:
    folder.members(1, [Member("server", 0, host, role)])
    assert [member["pid"] for member in living(folder)] == ([role] if there else [])


@pytest.mark.parametrize(
    ("change", "there"), [({}, True), ({"pid_space": "another"}, False), ({"pid_space": ""}, True)],
    ids=["here", "another container", "of an earlier version"],
)  # fmt: skip
def test_numbers_of_another_machine_or_container_name_no_process_here(
    folder: RunFolder, role: int, change: dict[str, str], there: bool
) -> None:
    folder.coordinator(LOCAL, pid=role)
    folder.members(1, [Member("server", 0, "127.0.0.1", role)])
    path = folder.path / "coordinator.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [member["role"] for member in living(folder)] == (["server", "coordinator"] if there else [])
