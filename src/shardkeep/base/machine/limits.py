"""The memory of this process, the limits of its control groups (of both versions), and whether they were reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from shardkeep.base.machine.control_groups import ROOT, groups_of, number_in, text_of
from shardkeep.base.sizes import size_text

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


def limit_bytes(root: Path = ROOT) -> int:
    """The smallest of the machine's memory and the limits of the control groups that this process is in."""
    folders, version = groups_of("memory", root)
    limits = (number_in(folder, _FILES["memory", version][0]) for folder in folders)
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit)])


class Limit:
    """The limits of one controller on this process and its children, from construction on. Not thread safe.

    `recent`: how many processes it has killed, refused or slowed of late, as `look` saw it."""

    def __init__(self, controller: str, root: Path = ROOT, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kills, self._name, self._clock = controller == "memory", controller, clock
        self._folders, version = groups_of(controller, root)
        self._limit, self._full, self._effect = _FILES[controller, version]
        self._began = [number_in(folder, self._full) for folder in self._folders]
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
            limit = text_of(folder / self._limit).strip()
            if number_in(folder, self._full) > began and limit not in ("", "max"):
                limit = size_text(int(limit)) if self.kills else limit
                place = folder / self._limit
                return f"the {self._name} limit of {limit} was reached ({place}: raise it, or run fewer processes)"
        return ""

    def _count(self) -> int:
        folders = self._folders[:1] if self.kills else self._folders  # a kill counts in groups around, too
        return sum(number_in(folder, self._effect) for folder in folders)


def limit_met(limits: Sequence[Limit], *, killed: bool) -> str:
    """The limit that ended a process which has just ended, in words; "" = none. `killed`: by SIGKILL, so that one kill
    is accounted for."""
    for limit in limits:
        limit.look()
        if limit.recent and (limit.kills or not killed):
            limit.recent -= killed
            return limit.text() or "the machine ran out of memory"
    return ""
