"""One coordinator leads a run folder: the one with the highest number, also for a machine that sees the folder late.

What it keeps for the one that takes over.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkeep.base.errors import Superseded, UserError
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Member
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from shardkeep.run.state_files import NAMES, StandingFiles
from tests.support.cases import every

MEMBERS = [Member("server", 0, "127.0.0.1", 11)]


class Late(RunFolder):
    """The folder as another machine sees it: as it was when this was made, until `catch_up`."""

    def __init__(self, path: Path) -> None:
        self._seen: list[str] | None = [entry.name for entry in path.iterdir()]
        super().__init__(path)

    def names(self) -> list[str]:
        return super().names() if self._seen is None else self._seen

    def catch_up(self) -> None:
        self._seen = None


@pytest.fixture
def first(tmp_path: Path) -> RunFolder:
    return led(tmp_path / "run")


def led(path: Path) -> RunFolder:
    """Of coordinator 1, which leads a job."""
    folder = RunFolder.create(path, JobConfig())
    folder.claim()
    folder.standing({"job": "first"})
    folder.coordinator("127.0.0.1:1000", pid=1)
    return folder


def succeed(first: RunFolder) -> RunFolder:
    folder = RunFolder(first.path)
    folder.claim()
    folder.standing({"job": "second"})
    folder.coordinator("127.0.0.1:2000", pid=2)
    return folder


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


WRITES: dict[str, Callable[[RunFolder], object]] = {
    "state": lambda folder: folder.standing({"job": "late"}),
    "summary": lambda folder: folder.finished("failed", "late", None),
    "addition to the summary": lambda folder: folder.amend({"test": None}),
    "record": lambda folder: folder.event({"text": "late"}),
    "progress": lambda folder: folder.progress({"step": 1}),
    "members": lambda folder: folder.members(1, MEMBERS),
    "address": lambda folder: folder.coordinator("127.0.0.1:3000", pid=3),
}


@every("write", WRITES.values(), ids=WRITES)
def test_the_older_coordinator_writes_nothing(tmp_path: Path, write: Callable[[RunFolder], object]) -> None:
    first = led(tmp_path)
    second = succeed(first)
    second.finished("completed", "", None)
    before = contents(first.path)
    with pytest.raises(Superseded, match="another coordinator leads the job; this one, 1, ends"):
        write(first)
    assert contents(first.path) == before


@every("write", WRITES.values(), ids=WRITES)
def test_a_late_write_changes_nothing_that_another_process_acts_on(
    tmp_path: Path, write: Callable[[RunFolder], object]
) -> None:
    first = led(tmp_path)
    older = Late(first.path)
    assert older.claim() == 2  # of a machine that does not see what happens from here on
    younger = succeed(first)
    write(older)
    reader = RunReader(first.path)
    assert (reader.number(), reader.address(), reader.summary()) == (3, "127.0.0.1:2000", None)
    assert reader.take_over() == {"job": "second"}
    younger.finished("completed", "", None)
    write(older)
    assert (RunReader(first.path).summary() or {})["status"] == "completed"
    older.catch_up()
    with pytest.raises(Superseded):
        write(older)


class Overtaken(RunFolder):
    """Another process claims a number as soon as this one has looked whether one has."""

    def names(self) -> list[str]:
        seen = super().names()
        RunFolder(self.path).claim()
        return seen


def test_nobody_learns_of_a_state_that_the_successor_may_not_have_read(first: RunFolder) -> None:
    number = RunFolder(first.path).claim()
    with pytest.raises(Superseded):
        Overtaken(first.path, number=number).standing({"job": "late"})
    assert json.loads((first.path / "standing.2.json").read_text())["standing"] == {"job": "late"}


@every("elsewhere", [False, True], ids=["own", "of another machine"])
def test_a_launcher_writes_for_its_own_coordinator_alone(tmp_path: Path, elsewhere: bool) -> None:
    first = led(tmp_path)
    launcher = RunFolder(first.path)
    (first.path / "recovery").mkdir()
    if elsewhere:
        path = first.path / "coordinator.1.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid_space": "another"}))
        before = contents(first.path)
        with pytest.raises(Superseded):
            launcher.finished("failed", "coordinator 0 ended", None)
        assert contents(first.path) == before
    else:
        launcher.finished("failed", "coordinator 0 ended", None)
        assert (launcher.summary() or {})["message"] == "coordinator 0 ended"
    launcher.forget_recovery()
    assert (first.path / "recovery").exists() == elsewhere


def test_a_summary_of_the_older_coordinator_is_not_the_jobs(first: RunFolder) -> None:
    first.finished("completed", "", None)
    assert (first.summary() or {})["status"] == "completed"
    second = RunFolder(first.path)
    second.claim()
    assert second.summary() is None and second.address() is None and second.endpoint() is None


def test_a_late_reader_sees_an_earlier_coordinator_whole(first: RunFolder) -> None:
    reader = Late(first.path)
    succeed(first).finished("completed", "", None)
    assert (reader.number(), reader.address(), reader.summary()) == (1, "127.0.0.1:1000", None)
    reader.catch_up()
    assert (reader.number(), reader.address()) == (2, "127.0.0.1:2000")
    assert (reader.summary() or {})["status"] == "completed"


def test_a_number_is_claimed_once_however_late_a_machine_sees_the_folder(first: RunFolder) -> None:
    late = Late(first.path)
    succeed(first).finished("completed", "", None)
    assert (late.number(), late.claim(), late.claim()) == (1, 3, 3)
    late.catch_up()
    assert (late.last_summary() or {})["status"] == "completed" and late.summary() is None


def test_the_successor_reads_the_last_state_and_keeps_no_older_one(first: RunFolder) -> None:
    second = RunFolder(first.path)
    second.claim()
    assert second.take_over() == {"job": "first"}
    third = RunFolder(first.path)  # the second one died before it kept anything
    third.claim()
    assert third.take_over() == {"job": "first"}
    third.standing({"job": "third"})
    third.coordinator("127.0.0.1:3000", pid=3)
    assert sorted(path.name for path in first.path.glob("standing*")) == ["standing-copy.3.json", "standing.3.json"]
    assert third.take_over() == {"job": "third"}
    third.finished("completed", "", None)
    assert not third.has_standing


def test_a_resumed_job_begins_with_nobodys_address_and_a_new_number(first: RunFolder) -> None:
    first.finished("stopped", "", {"steps": 4})
    again = RunFolder.reopen(first.path, JobConfig(), step=4)
    assert (again.number(), again.address(), again.summary(), again.has_standing) == (2, None, None, False)
    assert json.loads((first.path / "summary-4.json").read_text())["status"] == "stopped"
    assert not (first.path / "summary.json").exists() and not (first.path / "summary.1.json").exists()


def test_people_find_copies_without_a_number(first: RunFolder) -> None:
    second = succeed(first)
    second.finished("completed", "", None)
    for name in ("coordinator", "summary"):
        assert (first.path / f"{name}.json").read_bytes() == (first.path / f"{name}.2.json").read_bytes()


# ---- what a coordinator keeps for the one that takes over ----


RECORD = {"job": "j\u00f6b", "seats": [{"token": "t", "step": 3, "seconds": 0.1}], "summary": None}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"job")] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "garbage": lambda path: path.write_bytes(bytes(range(256))),
    "one bit": flip,
    "no checksum": lambda path: path.write_text('{"job": "x"}\n'),
    "a list": lambda path: path.write_text("[]"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "gone": Path.unlink,
}


def of_a_dead_coordinator(path: Path) -> RunFolder:
    """Of a job whose coordinator listened and then died."""
    folder = RunFolder(path)
    folder.standing({"job": "before"})
    folder.standing(RECORD)
    return folder


@every("name", NAMES)
@every("damage", DAMAGES.values(), ids=DAMAGES)
def test_another_coordinator_goes_on_with_the_file_that_is_whole(
    tmp_path: Path, damage: Callable[[Path], object], name: str
) -> None:
    folder = of_a_dead_coordinator(tmp_path)
    damage(folder.path / name)
    assert folder.take_over() == RECORD


@every("second", DAMAGES.values(), ids=DAMAGES)
@every("first", [DAMAGES["cut"], DAMAGES["gone"]], ids=["cut", "gone"])
def test_without_any_whole_file_one_line_names_them(
    tmp_path: Path, first: Callable[[Path], object], second: Callable[[Path], object]
) -> None:
    folder = of_a_dead_coordinator(tmp_path)
    for name, damage in zip(NAMES, (first, second), strict=True):
        damage(folder.path / name)
    with pytest.raises(UserError, match=r"^no coordinator can take over, .*standing(-copy)?\.json") as caught:
        folder.take_over()
    assert "\n" not in str(caught.value)


def test_the_files_are_private_and_go_when_the_job_is_over(tmp_path: Path) -> None:
    folder = of_a_dead_coordinator(tmp_path)
    assert [stat.S_IMODE((folder.path / name).stat().st_mode) for name in NAMES] == [0o600, 0o600]
    assert folder.has_standing
    folder.finished("completed", "", None)
    assert (folder.has_standing, StandingFiles(folder.path, 0).read()) == (False, None)
