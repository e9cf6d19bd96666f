"""The memory of this process, the limits of its control groups (of both versions), and whether they were reached."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import psutil

from shardkeep.base.sizes import size_text

PROC = Path("/proc/self")
RECENT_S = 10.0
"""What happens so long after a limit was reached has another cause."""
_FILES = {  # by controller and version: the limit, the count of when it was reached, the count of what that did
    ("memory", 1): ("memory.limit_in_bytes", "memory.failcnt", "memory.oom_control oom_kill"),
    ("memory", 2): ("memory.max", "memory.events oom", "memory.events oom_kill"),
    ("pids", 1): ("pids.max", "pids.events max", "pids.events max"),
    ("pids", 2): ("pids.max", "pids.events max", "pids.events max"),
    ("cpu", 1): ("cpu.cfs_quota_us", "cpu.stat nr_throttled", "cpu.stat nr_throttled"),
    ("cpu", 2): ("cpu.max", "cpu.stat nr_throttled", "cpu.stat nr_throttled"),
}


def rss_bytes() -> int:
    """What this process has in RAM now."""
    return int(psutil.Process().memory_info().rss)


def limit_bytes(proc: Path = PROC) -> int:
    """The smallest of the machine's memory and the limits of the control groups that this process is in."""
    folders, version = _groups("memory", proc)
    limits = (_number(folder, _FILES["memory", version][0]) for folder in folders)
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit)])


class Limit:
    """The limits of one controller on this process and its children, from construction on. Not thread safe.

    `recent`: how many processes it has killed, refused or slowed of late, as `look` saw it."""

    def __init__(self, controller: str, proc: Path = PROC, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kills, self._name, self._clock = controller == "memory", controller, clock
        self._folders, version = _groups(controller, proc)
        self._limit, self._full, self._effect = _FILES[controller, version]
        self._began = [_number(folder, self._full) for folder in self._folders]
        self._known, self._at, self.recent = self._count(), 0.0, 0

    def look(self) -> None:
        """Brings `recent` up to date. To be called often, so that it is known when a limit was reached."""
        now, before, self._known = self._clock(), self._known, self._count()
        if self._known > before:
            self.recent, self._at = self.recent + self._known - before, now
        elif now > self._at + RECENT_S:
            self.recent = 0

    def text(self) -> str:
        """The innermost limit that was reached; "" = none of this process's groups'."""
        for folder, began in zip(self._folders, self._began, strict=True):
            limit = _text(folder / self._limit).strip()
            if _number(folder, self._full) > began and limit not in ("", "max"):
                limit = size_text(int(limit)) if self.kills else limit
                place = folder / self._limit
                return f"the {self._name} limit of {limit} was reached ({place}: raise it, or run fewer processes)"
        return ""

    def _count(self) -> int:
        folders = self._folders[:1] if self.kills else self._folders  # a kill counts in groups around, too
        return sum(_number(folder, self._effect) for folder in folders)


def limit_met(limits: Sequence[Limit], *, killed: bool) -> str:
    """The limit that ended a process which has just ended, in words; "" = none. `killed`: by SIGKILL, so that one kill
    is accounted for."""
    for limit in limits:
        limit.look()
        if limit.recent and (limit.kills or not killed):
            limit.recent -= killed
            return limit.text() or "the machine ran out of memory"
    return ""


def _groups(controller: str, proc: Path) -> tuple[list[Path], int]:
    """The folders of this process's group of a controller and of the groups around it, inner first, as far as they are
    mounted here; and the version."""
    lines = [line.split(":", 2) for line in _text(proc / "cgroup").splitlines() if line.count(":") >= 2]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    version = 1 if controller in paths else 2
    own = PurePosixPath(paths.get(controller, paths.get("", "/")))
    for line in _text(proc / "mountinfo").splitlines():
        place, _, form = line.partition(" - ")
        root, mount = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in place.split()[3:5])
        kind, *_, options = form.split(" ", 2)
        if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in options.split(",")):
            inside = own.relative_to(root).parts if own.is_relative_to(root) and ".." not in own.parts else ()
            return [Path(mount).joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)], version
    return [], version


def _number(folder: Path, what: str) -> int:
    """The number in a file, or in its line that begins with a word; 0 = there is none, or no limit ("max")."""
    name, _, key = what.partition(" ")
    words = next((line.split() for line in _text(folder / name).splitlines() if line.startswith(key and f"{key} ")), [])
    with contextlib.suppress(ValueError, IndexError):
        return int(words[-1])
    return 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
