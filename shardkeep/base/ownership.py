"""Who else could change a file or folder: owner and mode of it and of all folders above, as sshd's StrictModes looks at
them. Knows nothing of what the files hold.

A folder that others can change is accepted below the folders that a person lists in `trusted-folders` (`lists`).
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
    """Raises ConfigError where somebody other than this user and root could change or replace `path`.

    `what`: how the message begins, as `--run-dir`. Where `path` does not exist yet, the folders above it are looked at:
    a sticky one, as /tmp, is no place to read from, but what we make there is ours."""
    if (doubt := sharer(path)) is not None:
        raise ConfigError(
            f"{what} {path}: {doubt}; allowed: what only you and root can change, so use a folder of your own, or list "
            f"one whose users you trust in {lists()[0]}"
        )


def sharer(path: str | Path) -> str | None:
    """Why somebody other than this user and root could change `path`, in words, with the fix; None = nobody could.

    Links on the way are looked at, and followed. What cannot be looked at is in doubt, too."""
    try:
        if _trusted(Path(path).resolve()):
            return None
        entries = list(_way(Path(path).absolute()))
        last = len(entries) - 1 if Path(path).exists() else len(entries)
    except (OSError, RuntimeError) as error:
        return f"cannot be looked at ({getattr(error, 'strerror', None) or error})"
    for place, (entry, found) in enumerate(entries):
        if not _is_ours(found.st_uid):
            return f"{entry} belongs to another user (uid {found.st_uid})"
        if stat.S_ISLNK(found.st_mode):  # its mode means nothing
            continue
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX and place != last:
            continue  # entries there are changed by their owners alone, and these are looked at
        if mode & stat.S_IWOTH:
            return f"others can change {entry} (mode {mode:04o}): chmod o-w {entry}"
        if mode & stat.S_IWGRP and not _only_ours(found.st_gid):
            return f"group {_group(found.st_gid)} can change {entry} (mode {mode:04o}): chmod g-w {entry}"
    return None


def lists() -> tuple[Path, Path]:
    """The files with folders, one a line, that are trusted whoever can change them: this user's, and the machine's."""
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not named.is_absolute():  # such a value is to be ignored
        named = Path(os.path.expanduser("~")) / ".config"  # noqa: PTH111 - Path.home() raises without a home
    return named / "shardkeep" / "trusted-folders", Path("/etc/shardkeep/trusted-folders")


def _trusted(path: Path) -> bool:
    for file in lists():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        if any(path.is_relative_to(Path(line.strip()).resolve()) for line in lines if line.strip().startswith("/")):
            return True
    return False


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every entry from the root to `path`, those of links and their targets included; up to the first that is missing.

    Raises OSError."""
    at, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    yield at, at.lstat()
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        try:
            found = entry.lstat()
        except FileNotFoundError:
            return
        yield entry, found
        if not stat.S_ISLNK(found.st_mode):
            at = entry
            continue
        if (links := links + 1) > _MOST_LINKS:
            raise RuntimeError(f"too many links at {entry}")
        target = entry.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _is_ours(uid: int) -> bool:
    """This user's or root's. To root also that of a user whom this machine does not know: a container's volume has the
    numbers of the machine outside."""
    if uid in (0, os.geteuid()):
        return True
    if os.geteuid() != 0:
        return False
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return True
    return False


def _only_ours(gid: int) -> bool:
    """Whether nobody else is known to be in the group: many systems give each user a group of their own, and new files
    to it. One without any known member may be everybody's."""
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(gid).gr_mem}
    except KeyError:
        return False
    members |= {user.pw_uid for user in pwd.getpwall() if user.pw_gid == gid}
    return bool(members) and members <= {0, os.geteuid()}


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
