"""Who could have put a file there: owners and modes, checked as ssh checks them. Reads no content.

What others can change is trusted below the folders that a person lists in `trusted-folders` (`lists`): on volumes and
file systems where owners and modes mean nothing.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.errors import ConfigError

_MOST_LINKS = 40  # as Linux follows


def check_unshared(path: str | Path, *, what: str) -> None:
    """Raises ConfigError where somebody other than this user and root could change or replace `path`, or could add
    something to it if it is a folder. If it is not there yet, the folders above it count.

    `what`: how the message begins, as `--run-dir`."""
    given = Path(path).absolute()
    place = next(part for part in (given, *given.parents) if os.path.lexists(part))
    try:
        why = why_distrusted(place, above=True)
        if why is None and place == given and _is_for_all(place) and not _is_listed(place):
            why = f"{place} takes files of other users"
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{what} {path}: cannot be looked at ({getattr(error, 'strerror', None) or error})"
        ) from error
    if why is not None:
        raise ConfigError(
            f"{what} {path}: {why}; allowed: what only you and root can change (another folder, or chmod go-w); if you "
            f"trust all who can, list the folder in {lists()[0]} (in a container image: {lists()[1]})"
        )


def why_distrusted(path: str | Path, *, above: bool = False) -> str | None:
    """Why other users could have made or changed `path`, in words that begin with a path; None = only we or root could.

    Trusted is what belongs to us or to root and what nobody else may write. A group may write where it is our
    own and has no other member. A folder with the sticky bit is trusted although others may write it: they cannot
    replace what is not theirs, but they can add to it, so its files are checked too. A link and its target are
    both checked. Everything below a listed folder is trusted.

    Args:
        path: file or folder.
        above: also ask about all folders above it: who can write one of them can replace the path.

    Raises:
        OSError: there is no such path, or it cannot be looked at.
    """
    named = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", resolve follows links
    real = named.resolve(strict=True)
    for part in _way(named) if above else dict.fromkeys((named, real)):
        if (why := _why(part)) is not None:
            return None if _is_listed(real) else why
    return None


def lists() -> tuple[Path, Path]:
    """The files that list trusted folders, one a line, although others can write them: the user's, the machine's."""
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not named.is_absolute():  # such a value is to be ignored
        named = Path(os.path.expanduser("~")) / ".config"  # noqa: PTH111 - Path.home() raises without a home
    return named / "shardkeep" / "trusted-folders", Path("/etc/shardkeep/trusted-folders")


def _is_listed(path: Path) -> bool:
    for file in lists():
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            continue
        if any(path.resolve().is_relative_to(Path(line).resolve()) for line in lines if line.startswith("/")):
            return True
    return False


def _way(path: Path) -> Iterator[Path]:
    """Every entry from the root to `path`: links, the folders that hold them, and what they lead to. Raises OSError."""
    at, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    yield at
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        yield (entry := at / name)
        if not entry.is_symlink():
            at = entry
            continue
        if (links := links + 1) > _MOST_LINKS:
            raise OSError(f"{entry}: too many links")
        target = entry.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _why(path: Path) -> str | None:
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if _is_open(status):
        return f"{path} can be written by other users (mode {stat.S_IMODE(mode):04o})"
    return None


def _is_open(status: os.stat_result) -> bool:
    """Whether its mode lets others write."""
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)))


def _is_for_all(path: Path) -> bool:
    """Whether it is a folder in which others may make files."""
    return path.is_dir() and _is_open(path.stat())


def _is_private(gid: int) -> bool:
    """Whether it is our own group, as umask 002 needs it, and nobody but us and root is in it.

    It must have our name or our number: a directory service (LDAP) may keep back which users have the group."""
    if gid == 0:
        return True
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
        members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    except KeyError:
        return False
    return (group.gr_name == name or gid == os.geteuid()) and members <= {"root", name}
