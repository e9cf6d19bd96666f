"""Who could have put a file there: owners and modes, checked as ssh checks them. Reads no content."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def why_distrusted(path: str | Path, *, above: bool = False) -> str | None:
    """Why other users could have made or changed `path`, in words that begin with a path; None = only we or root could.

    Trusted is what belongs to us or to root and what nobody else may write. A group may write where we are its only
    member. A folder with the sticky bit is trusted although others may write it: they cannot replace what is not
    theirs, but they can add to it, so the files in it need the same question. A link is asked about, and what it
    leads to.

    Args:
        path: file or folder.
        above: also ask about all folders above it: who can write one of them can replace the path.

    Raises:
        OSError: there is no such path, or it cannot be looked at.
    """
    named = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", resolve follows links
    real = named.resolve(strict=True)
    for place in dict.fromkeys((named, real)):
        for part in (place, *place.parents) if above else (place,):
            if (why := _why(part)) is not None:
                return why
    return None


def _why(path: Path) -> str | None:
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        return f"{path} can be written by other users (mode {stat.S_IMODE(mode):04o})"
    return None


def _is_private(gid: int) -> bool:
    """Whether nobody but us and root is in the group: so are users' own groups, with which umask 002 goes."""
    if gid == 0:
        return True
    try:
        names = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        members = {*grp.getgrgid(gid).gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    except KeyError:
        return False
    return members <= names
