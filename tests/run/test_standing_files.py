"""What a coordinator keeps for the one that takes over: either of the two files will do."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkeep.base.errors import UserError
from shardkeep.run.folder import RunFolder
from shardkeep.run.state_files import NAMES, StandingFiles
from tests.support.cases import every

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
