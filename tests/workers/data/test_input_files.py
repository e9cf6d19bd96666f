"""What files an entry of data.train names, and one line for those that cannot be read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.input_files import find_files
from tests.support.owners import STRANGER


@contextlib.contextmanager
def _without_rights() -> Iterator[None]:
    """Modes of files count for root, too."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """days/1/a.csv and days/2/b.csv, where everybody may go."""
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own folders are private
        if parent.owner() == tmp_path.owner() and not parent.stat().st_mode & 0o005:
            parent.chmod(0o755)
    for part, name in (("1", "a.csv"), ("2", "b.csv")):
        (tmp_path / "days" / part).mkdir(parents=True)
        (tmp_path / "days" / part / name).write_text("x,y\n1,0\n")
    yield tmp_path
    for path in (tmp_path / "days", tmp_path / "days" / "1"):
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("closed", "mode", "entry"),
    [
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
    ],
)
def test_a_folder_that_may_not_be_read_is_named(folder: Path, closed: str, mode: int, entry: str) -> None:
    (folder / closed).chmod(mode)
    with (
        _without_rights(),
        pytest.raises(DataError, match=rf"/{closed}.*: cannot be read .Permission denied. .data.train.$"),
    ):
        find_files(folder, [entry], key="data.train", kind="csv")


def test_a_root_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "days").chmod(0o000)
    with _without_rights(), pytest.raises(DataError, match=r"days.*: cannot be read .Permission denied"):
        find_files(folder / "days", ["1/a.csv"], key="data.train", kind="csv")


def test_patterns_find_files_in_order_of_their_names(folder: Path) -> None:
    for pattern in ("days/**/*.csv", "days/*/*.csv", "days/**", "days/[12]/?.csv"):
        found = find_files(folder, [pattern], key="data.train", kind="csv")
        assert [path.name for path in found] == ["a.csv", "b.csv"]


@pytest.mark.parametrize(
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
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=why) as caught:
        find_files(folder, [name], key="data.train", kind="csv")
    assert "\n" not in str(caught.value)
