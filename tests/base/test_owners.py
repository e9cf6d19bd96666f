"""Whose a path is: ours, root's, or somebody's who could have put anything there."""

from __future__ import annotations

import contextlib
import grp
import os
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.owners import check_unshared, lists, why_distrusted
from tests.support.cases import every
from tests.support.owners import STRANGER, make_foreign


def test_what_is_ours_alone_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert why_distrusted(tmp_path / "file") is None
    assert why_distrusted(tmp_path, above=True) is None
    assert why_distrusted("/") is None
    with pytest.raises(FileNotFoundError):
        why_distrusted(tmp_path / "none")
    (tmp_path / "file").chmod(0o646)
    assert "can be written by other users (mode 0646)" in str(why_distrusted(tmp_path / "file"))
    make_foreign(tmp_path, monkeypatch)
    assert f"{tmp_path}/file belongs to another user (uid " in str(why_distrusted(tmp_path / "file"))


@every(("mode", "trusted"), [(0o755, True), (0o757, False), (0o777, False), (0o1777, True)])
def test_a_folder_that_others_can_write_needs_the_sticky_bit(tmp_path: Path, mode: int, trusted: bool) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "a").chmod(mode)
    assert (why_distrusted(tmp_path / "a") is None) == trusted
    assert (why_distrusted(tmp_path / "a" / "file", above=True) is None) == trusted
    assert why_distrusted(tmp_path / "a" / "file") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a group")
def test_a_group_may_write_only_where_it_has_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o664)
    assert why_distrusted(tmp_path / "file") is None  # root's own group
    os.chown(tmp_path / "file", 0, STRANGER)
    assert "mode 0664" in str(why_distrusted(tmp_path / "file"))
    for name, trusted in (("root", True), ("team", False)):
        group = grp.struct_group((name, "x", STRANGER, []))  # a directory service may not list its users
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        assert (why_distrusted(tmp_path / "file") is None) == trusted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_is_as_trusted_as_the_link_and_what_it_leads_to(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "theirs" / "file")
    assert why_distrusted(tmp_path / "link", above=True) is None
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    assert why_distrusted(tmp_path / "link") is None
    assert "theirs belongs" in str(why_distrusted(tmp_path / "link", above=True))
    os.chown(tmp_path / "theirs" / "file", STRANGER, STRANGER)
    assert "theirs/file belongs" in str(why_distrusted(tmp_path / "link"))
    (tmp_path / "other").symlink_to(tmp_path / "ours" / "file")
    os.chown(tmp_path / "other", STRANGER, STRANGER, follow_symlinks=False)
    assert "other belongs" in str(why_distrusted(tmp_path / "other"))


def test_every_folder_on_the_way_of_a_link_counts(tmp_path: Path) -> None:
    for name in ("ours", "shared"):
        (tmp_path / name).mkdir()
    (tmp_path / "ours" / "file").write_text("")
    (tmp_path / "shared" / "link").symlink_to("../ours/file")
    (tmp_path / "to").symlink_to(tmp_path / "shared" / "link")
    assert why_distrusted(tmp_path / "to", above=True) is None
    (tmp_path / "shared").chmod(0o777)
    assert f"{tmp_path}/shared can be written" in str(why_distrusted(tmp_path / "to", above=True))
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(ConfigError, match=r"--run-dir .*round: cannot be looked at"):
        check_unshared(tmp_path / "round", what="--run-dir")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    return tmp_path / "a" / "b"


def test_what_others_could_change_or_replace_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    paths = [folder, folder / "missing", folder / "missing" / "too", Path("new")]
    for path in paths:
        check_unshared(path, what="--resume")
    folder.parent.chmod(0o777)
    for path in paths:
        with pytest.raises(ConfigError, match=rf"^--resume {path}: {folder.parent} can be written by") as refused:
            check_unshared(path, what="--resume")
        assert "\n" not in str(refused.value) and all(str(file) in str(refused.value) for file in lists())
    folder.parent.chmod(0o755)
    folder.chmod(0o1777)
    check_unshared(folder / "new", what="--run-dir")
    with pytest.raises(ConfigError, match="takes files of other users"):
        check_unshared(folder, what="--run-dir")


def test_folders_that_a_person_lists_are_trusted_whoever_can_change_them(folder: Path) -> None:
    folder.chmod(0o777)
    lists()[0].parent.mkdir(parents=True)
    for lines, trusted in (
        (f"{folder}er\n# {folder}\nb\n", False),
        (f"{folder}\n", True),
        (f"x\n{folder.parent}/\n", True),
    ):
        lists()[0].write_text(lines)
        assert (why_distrusted(folder) is None) == trusted
        with contextlib.nullcontext() if trusted else pytest.raises(ConfigError):
            check_unshared(folder, what="--run-dir")
