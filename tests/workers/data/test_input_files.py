"""What files an entry of data.train names, and one line for those that cannot be read."""

from __future__ import annotations

import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.input_files import find_files
from tests.support.cases import every
from tests.support.forked import fork_context
from tests.support.owners import STRANGER


def refused_to_strangers(root: Path, entries: list[str], closed: list[tuple[Path, int]], answers: Connection) -> None:
    """Sends the errors of a user to whom each folder is closed in turn. Runs in a process of its own: the kernel does
    not forgive a change of the user."""
    for entry, (path, mode) in zip(entries, closed, strict=True):
        path.chmod(mode)
        if as_root := os.geteuid() == 0:  # to whom all is open
            os.seteuid(STRANGER)
        try:
            found = str(find_files(root, [entry], key="data.train", kind="csv"))
        except DataError as error:
            found = str(error)
        if as_root:
            os.seteuid(0)
        path.chmod(0o755)
        answers.send(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """days/1/a.csv and days/2/b.csv, where everybody may go."""
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own folders are private
        if parent.owner() == tmp_path.owner() and not parent.stat().st_mode & 0o005:
            parent.chmod(0o755)
    for part, name in (("1", "a.csv"), ("2", "b.csv")):
        (tmp_path / "days" / part).mkdir(parents=True)
        (tmp_path / "days" / part / name).write_text("x,y\n1,0\n")
    return tmp_path


CLOSED = [
    ("days", 0o000, "days"),
    ("days", 0o000, "days/1/a.csv"),
    ("days", 0o000, "days/*/a.csv"),
    ("days/1", 0o000, "days/1"),
    ("days/1", 0o000, "days/1/*.csv"),
    ("days/1", 0o000, "days/*/*.csv"),
    ("days/1", 0o000, "days/**/*.csv"),
    ("days/1", 0o000, "days/**"),
    ("days/1", 0o444, "days/1"),
    ("days/1", 0o444, "days/1/*.csv"),
]


@pytest.mark.waits_for_processes
def test_a_folder_that_may_not_be_read_is_named(folder: Path) -> None:
    context = fork_context()
    answers, tell = context.Pipe(duplex=False)
    asked = [[entry for _, _, entry in CLOSED], [(folder / closed, mode) for closed, mode, _ in CLOSED]]
    for root, entries, paths in ((folder, *asked), (folder / "days", ["1/a.csv"], [(folder / "days", 0o000)])):
        child = context.Process(target=refused_to_strangers, args=(root, entries, paths, tell))
        child.start()
        for entry, (path, mode) in zip(entries, paths, strict=True):
            assert answers.poll(60.0)
            told = answers.recv()
            assert re.search(rf"{path}.*: cannot be read .Permission denied. .data.train.$", told), (entry, mode, told)
        child.join()
    answers.close()
    tell.close()


def test_patterns_find_files_in_order_of_their_names(folder: Path) -> None:
    for pattern in ("days/**/*.csv", "days/*/*.csv", "days/**", "days/[12]/?.csv"):
        found = find_files(folder, [pattern], key="data.train", kind="csv")
        assert [path.name for path in found] == ["a.csv", "b.csv"]


@every(
    ("name", "why"),
    [
        ("fifo", "is neither a file nor a folder"),
        ("/dev/zero", "is neither a file nor a folder"),
        ("loop", "is a link that leads nowhere"),
        ("dangling", "is a link that leads nowhere"),
        ("a\0b.csv", "no such file|is no path"),
        ("x" * 300, "cannot be read .File name too long."),
        ("~no_such_user_at_all/x.csv", "is no path .Could not determine home directory"),
        ("empty", "the folder has no files .data.train."),
        ("days", r"the folder has no files .data.train.; for those in its subfolders: data.train: .days/\*\*/\*"),
        ("no/such/*.csv", "no file matches"),
    ],
    ids=["fifo", "device", "loop", "dangling", "nul", "long", "home", "empty", "folders", "nothing"],
)  # fmt: skip
def test_what_is_no_file_of_data_is_refused_at_once(folder: Path, name: str, why: str) -> None:
    if not (folder / "empty").exists():
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "dangling").symlink_to(folder / "nothing")
        (folder / "empty").mkdir()
    with pytest.raises(DataError, match=why) as caught:
        find_files(folder, [name], key="data.train", kind="csv")
    assert "\n" not in str(caught.value)
