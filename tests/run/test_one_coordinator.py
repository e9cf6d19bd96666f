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


class Late(RunFolder):
    """The folder as another machine sees it: as it was when this was made, until `catch_up`."""

    def __init__(self, path: Path) -> None:
        self._seen: list[str] | None = [entry.name for entry in path.iterdir()]
        super().__init__(path)

    def names(self) -> list[str]:
        return super().names() if self._seen is None else self._seen

    def catch_up(self) -> None:
        self._seen = None


def led(path: Path) -> RunFolder:
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
    "members": lambda folder: folder.members(1, [Member("server", 0, "127.0.0.1", 11)]),
    "address": lambda folder: folder.coordinator("127.0.0.1:3000", pid=3),
}


@every("write", WRITES.values(), ids=WRITES)
def test_the_older_coordinator_writes_nothing(tmp_path: Path, write: Callable[[RunFolder], object]) -> None:
    first = led(tmp_path)
    succeed(first).finished("completed", "", None)
    before = contents(first.path)
    with pytest.raises(Superseded, match="another coordinator leads the job; this one, 1, ends"):
        write(first)
    assert contents(first.path) == before


@every("write", WRITES.values(), ids=WRITES)
def test_a_late_write_changes_nothing_that_another_process_acts_on(
    tmp_path: Path, write: Callable[[RunFolder], object]
) -> None:
    older = Late(led(tmp_path).path)
    assert older.claim() == 2  # of a machine that does not see what happens from here on
    younger = succeed(older)
    write(older)
    reader = RunReader(tmp_path)
    assert (reader.number(), reader.address(), reader.summary()) == (3, "127.0.0.1:2000", None)
    assert reader.take_over() == {"job": "second"}
    younger.finished("completed", "", None)
    write(older)
    assert (RunReader(tmp_path).summary() or {})["status"] == "completed"
    older.catch_up()
    with pytest.raises(Superseded):
        write(older)


def test_nobody_learns_of_a_state_that_the_successor_may_not_have_read(tmp_path: Path) -> None:
    class Overtaken(RunFolder):
        """Another process claims a number as soon as this one has looked whether one has."""

        def names(self) -> list[str]:
            seen = super().names()
            RunFolder(self.path).claim()
            return seen

    first = led(tmp_path)
    number = RunFolder(first.path).claim()
    with pytest.raises(Superseded):
        Overtaken(first.path, number=number).standing({"job": "late"})
    assert json.loads((first.path / "standing.2.json").read_text())["standing"] == {"job": "late"}


@every("elsewhere", [False, True], ids=["own", "of another machine"])
def test_a_launcher_writes_for_its_own_coordinator_alone(tmp_path: Path, elsewhere: bool) -> None:
    launcher = RunFolder(led(tmp_path).path)
    (tmp_path / "recovery").mkdir()
    if elsewhere:
        path = tmp_path / "coordinator.1.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid_space": "another"}))
        before = contents(tmp_path)
        with pytest.raises(Superseded):
            launcher.finished("failed", "coordinator 0 ended", None)
        assert contents(tmp_path) == before
    else:
        launcher.finished("failed", "coordinator 0 ended", None)
        assert (launcher.summary() or {})["message"] == "coordinator 0 ended"
    launcher.forget_recovery()
    assert (tmp_path / "recovery").exists() == elsewhere


def test_a_late_machine_sees_an_earlier_coordinator_whole_and_a_number_is_claimed_once(tmp_path: Path) -> None:
    late = Late(led(tmp_path).path)
    second = succeed(late)
    second.finished("completed", "", None)
    assert (late.number(), late.address(), late.summary()) == (1, "127.0.0.1:1000", None)
    reader = RunReader(tmp_path)
    assert (reader.number(), reader.address()) == (2, "127.0.0.1:2000")
    assert (reader.summary() or {})["status"] == "completed"
    for name in ("coordinator", "summary"):  # people find copies without a number
        assert (tmp_path / f"{name}.json").read_bytes() == (tmp_path / f"{name}.2.json").read_bytes()
    assert (late.claim(), late.claim()) == (3, 3)
    late.catch_up()
    assert (late.last_summary() or {})["status"] == "completed"  # of the older one, so it is not the job's
    assert late.summary() is None and late.address() is None and late.endpoint() is None


def test_the_successor_reads_the_last_state_and_keeps_no_older_one(tmp_path: Path) -> None:
    second = RunFolder(led(tmp_path).path)
    second.claim()
    assert second.take_over() == {"job": "first"}
    third = RunFolder(tmp_path)  # the second one died before it kept anything
    third.claim()
    assert third.take_over() == {"job": "first"}
    third.standing({"job": "third"})
    third.coordinator("127.0.0.1:3000", pid=3)
    assert sorted(path.name for path in tmp_path.glob("standing*")) == ["standing-copy.3.json", "standing.3.json"]
    assert third.take_over() == {"job": "third"}
    third.finished("completed", "", None)
    assert not third.has_standing


def test_a_resumed_job_begins_with_nobodys_address_and_a_new_number(tmp_path: Path) -> None:
    led(tmp_path).finished("stopped", "", {"steps": 4})
    again = RunFolder.reopen(tmp_path, JobConfig(), step=4)
    assert (again.number(), again.address(), again.summary(), again.has_standing) == (2, None, None, False)
    assert json.loads((tmp_path / "summary-4.json").read_text())["status"] == "stopped"
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "summary.1.json").exists()


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


@every("name", range(2))
@every("damage", DAMAGES)
def test_another_coordinator_goes_on_with_the_file_that_is_whole_and_without_one_a_line_names_them(
    tmp_path: Path, damage: str, name: int
) -> None:
    folder = RunFolder(tmp_path)
    folder.standing({"job": "before"})
    folder.standing(RECORD)
    assert [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in NAMES] == [0o600, 0o600]
    DAMAGES[damage](tmp_path / NAMES[name])
    assert folder.take_over() == RECORD and folder.has_standing
    DAMAGES["gone" if damage == "cut" else "cut"](tmp_path / NAMES[1 - name])
    with pytest.raises(UserError, match=r"^no coordinator can take over, .*standing(-copy)?\.json") as caught:
        folder.take_over()
    assert "\n" not in str(caught.value)
    if damage != "a folder":
        folder.finished("completed", "", None)
        assert (folder.has_standing, StandingFiles(tmp_path, 0).read()) == (False, None)
