"""Which files and folders somebody else could change."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.ownership import check_unshared, lists, sharer

ANOTHER = 1
"""A user that this machine knows: daemon."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a/b/file, which nobody else can change."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "file").write_text("x")
    (folder / "file").chmod(0o644)
    return folder


def test_what_only_we_can_change_is_accepted(folder: Path) -> None:
    for path in (folder, folder / "file", folder / "missing", folder / "missing" / "too"):
        assert sharer(path) is None
        check_unshared(path, what="--run-dir")


@pytest.mark.parametrize(
    ("at", "mode", "doubt"),
    [
        ("file", 0o666, r"others can change \S+/a/b/file \(mode 0666\): chmod o-w \S+/a/b/file"),
        (".", 0o777, r"others can change \S+/a/b \(mode 0777\): chmod o-w \S+/a/b"),
        ("..", 0o757, r"others can change \S+/a \(mode 0757\)"),
    ],
    ids=["the file", "its folder", "the folder above"],
)
def test_what_others_can_write_is_refused_in_one_line_with_the_fix(
    folder: Path, at: str, mode: int, doubt: str
) -> None:
    (folder / at).resolve().chmod(mode)
    with pytest.raises(ConfigError, match=rf"^--resume {folder / 'file'}: {doubt}") as refused:
        check_unshared(folder / "file", what="--resume")
    assert "\n" not in str(refused.value) and str(lists()[0]) in str(refused.value)


def test_below_a_sticky_folder_our_own_is_accepted_but_not_the_folder_itself(folder: Path) -> None:
    folder.chmod(0o1777)
    assert sharer(folder / "file") is None
    assert sharer(folder / "missing") is None
    assert "others can change" in (sharer(folder) or "")


def test_a_relative_path_is_looked_at_up_to_the_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert sharer("file") is None
    folder.parent.chmod(0o777)
    assert "others can change" in (sharer("file") or "")


def test_a_link_is_followed_and_its_own_folder_counts(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(folder / "file")
    (folder / "to").symlink_to("../../shared/link")
    assert sharer(folder / "to") is None
    shared.chmod(0o777)
    assert f"others can change {shared}" in (sharer(folder / "to") or "")
    (folder / "round").symlink_to("round")
    assert "cannot be looked at" in (sharer(folder / "round") or "")


@needs_root
@pytest.mark.parametrize("at", ["file", ".", ".."])
def test_what_belongs_to_another_user_is_refused(folder: Path, at: str) -> None:
    os.chown(folder / at, ANOTHER, 0)
    assert f"belongs to another user (uid {ANOTHER})" in (sharer(folder / "file") or "")


@needs_root
def test_in_a_sticky_folder_only_what_is_ours_is_accepted(folder: Path) -> None:
    folder.chmod(0o1777)
    os.lchown(folder / "file", ANOTHER, 0)
    assert "belongs to another user" in (sharer(folder / "file") or "")
    (folder / "link").symlink_to("/etc/passwd")
    os.lchown(folder / "link", ANOTHER, 0)
    assert "belongs to another user" in (sharer(folder / "link") or "")


@needs_root
def test_to_root_in_a_container_a_volume_of_a_user_unknown_there_is_its_own(folder: Path) -> None:
    known = {user.pw_uid for user in pwd.getpwall()}
    os.chown(folder, next(uid for uid in range(60_000, 61_000) if uid not in known), 0)
    assert sharer(folder / "file") is None


def test_a_group_may_write_where_nobody_else_is_in_it(folder: Path) -> None:
    """As with users' private groups and a umask of 002; of a group without a name nothing is known."""
    own = all(user.pw_uid in (0, os.geteuid()) for user in pwd.getpwall() if user.pw_gid == os.getegid())
    folder.chmod(0o775)
    assert (sharer(folder / "file") is None) == own
    if os.geteuid() == 0:
        os.chown(folder, -1, 60_123)
        assert "group 60123 can change" in (sharer(folder / "file") or "")
        os.chown(folder, -1, pwd.getpwuid(ANOTHER).pw_gid)
        assert "can change" in (sharer(folder / "file") or "")


def test_folders_that_a_person_lists_are_trusted_whoever_can_change_them(folder: Path) -> None:
    folder.chmod(0o777)
    lists()[0].parent.mkdir(parents=True)
    lists()[0].write_text(f"{folder}er\n# why\nrelative\n")
    assert sharer(folder / "file") is not None
    lists()[0].write_text(f"{folder.parent}\n")
    assert sharer(folder / "file") is None
