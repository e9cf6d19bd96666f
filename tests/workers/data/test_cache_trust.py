"""Whose entries of the cache are believed, and what is done where the cache's folder is another user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.input_files import identity
from tests.support.cases import every
from tests.support.data_files import first_column, opened
from tests.support.owners import STRANGER, make_foreign


def _open(folder: Path, **settings: Any) -> tuple[list[float], str]:
    data = opened(folder, dense=["x"], **settings)
    return first_column(data.train), data.source


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of data; the user's own cache is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.csv").write_text("x,y\n1,0\n2,1\n3,1\n")
    return folder


def _poison(data: Path) -> Path:
    """Other values in the entry of the file, as another user would write them; the entry."""
    file = data / "a.csv"
    content, status = file.read_text(), file.stat()
    file.write_text("x,y\n7,1\n8,0\n9,0\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    _open(data)
    (entry,) = data.glob(".shardkeep-cache/a-*")
    meta = (entry / "meta.json").read_text()
    file.write_text(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = meta[meta.index('"inputs"') : meta.index('"sizes"')]
    probe, own = before.split('"')[-2], str(identity(file, of=1)[-1])
    (entry / "meta.json").write_text(meta.replace(probe, own))
    return entry


@pytest.mark.parametrize("part", ["cache", "entry", "meta.json", "train.arrow"])
def test_an_entry_that_another_user_can_have_made_is_not_read(
    data: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    entry = _poison(data)
    assert _open(data)[0] == [7.0, 8.0, 9.0]  # ours would be believed
    path = {"cache": entry.parent, "entry": entry}.get(part, entry / part)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        make_foreign(path, monkeypatch)
    values, place = _open(data)
    assert values == [1.0, 2.0, 3.0]
    assert (str(data) in place) == (part not in ("cache", "entry")) or "-" + str(os.geteuid()) in place


def test_an_entry_that_others_can_write_is_made_again(data: Path) -> None:
    for part in ("", "meta.json", "train.arrow"):
        path = _poison(data) / part
        path.chmod(path.stat().st_mode | 0o002)
        assert _open(data)[0] == [1.0, 2.0, 3.0], part


def test_entries_are_for_us_to_write_whatever_the_umask(data: Path) -> None:
    before = os.umask(0o000)
    cache = data / ".shardkeep-cache"
    try:
        _open(data)
        (data / "a.csv").write_text("x,y\n4,0\n5,1\n")
        assert _open(data)[0] == [4.0, 5.0]  # converted again
    finally:
        os.umask(before)
    assert len(list(cache.glob("a-*"))) == 1
    assert [p for p in (cache, *cache.rglob("*")) if p.stat().st_mode & 0o022 and not p.name.endswith(".lock")] == []
    cache.chmod(0o777)  # ours, and open to others: it is closed to them
    assert str(data) in _open(data)[1] and cache.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_beside_the_cache_or_the_entry_of_another_user_each_has_one_of_ones_own(data: Path, tmp_path: Path) -> None:
    (data / ".shardkeep-cache").mkdir()
    os.chown(data / ".shardkeep-cache", STRANGER, STRANGER)
    values, place = _open(data)
    assert values == [1.0, 2.0, 3.0] and str(tmp_path / "home") in place
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)  # the sticky bit
    _open(data, cache=str(shared))
    (entry,) = shared.glob("a-*")
    for path in (entry, *shared.iterdir(), *entry.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    values, place = _open(data, cache=str(shared))
    assert values == [1.0, 2.0, 3.0] and f"{entry}-0" in place and entry.stat().st_uid == STRANGER


def test_a_cache_that_others_can_write_is_refused_where_it_is_named_or_temporary(data: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(DataError, match=r"data.cache: .*shared can be written by other users .mode 0777.; allowed: "):
        _open(data, cache=str(tmp_path / "shared"))
    data.chmod(0o555)
    (tmp_path / "home").mkdir(mode=0o555)
    planted = tmp_path / f"shardkeep-data-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o707)
    with pytest.raises(DataError, match="can be written by other users"):
        _open(data)
    planted.rmdir()
    assert str(planted) in _open(data)[1] and planted.stat().st_mode & 0o777 == 0o700


@every(
    ("cache", "why"),
    [
        ("a.csv", "it is no folder"),
        ("a.csv/x", "File exists|Not a directory"),
        ("loop", "a link that leads to itself"),
        ("a/" * 1500, "too many folders|File name too long"),
        ("/proc/x", "No such file"),
        ("/dev/full", "can be written by other users|it is no folder"),
    ],
)
def test_a_cache_that_can_be_no_folder_is_refused(data: Path, cache: str, why: str) -> None:
    if not (data / "loop").is_symlink():
        (data / "loop").symlink_to(data / "loop")
    with pytest.raises(DataError, match=why) as caught:
        _open(data, cache=cache)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
