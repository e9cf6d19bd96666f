"""Memory that this process has in RAM, and the most that its control group or machine lets it have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

PROC, CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")


def rss_bytes() -> int:
    """What this process has in RAM now."""
    return int(psutil.Process().memory_info().rss)


def limit_bytes(proc: Path = PROC, groups: Path = CGROUPS) -> int:
    """The smallest of the machine's memory and the limits of the control groups that this process is in."""
    return min([int(psutil.virtual_memory().total), *_group_limits(proc, groups)])


def _group_limits(proc: Path, groups: Path) -> Iterator[int]:
    """The limits of the groups and of those around them, of both versions of control groups."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0" and not controllers:
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in (top.joinpath(*Path(path).parts[1:depth]) for depth in range(1, len(Path(path).parts) + 1)):
            with contextlib.suppress(OSError, ValueError):  # "max" = no limit
                yield int((folder / name).read_text())
