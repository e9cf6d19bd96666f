"""The control groups, of both versions, that this process is in, as the files below a folder show them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Quota(NamedTuple):
    """How much CPU time the processes of a group may use together."""

    cores: float
    """CPU seconds in a second."""
    file: Path
    """Where the kernel shows it."""


def groups_of(controller: str, root: Path = ROOT) -> tuple[list[Path], int]:
    """The folders of this process's group of a controller and of the groups around it, inner first, as far as they are
    mounted below `root`; and the version."""
    proc = root / "proc/self"
    lines = [line.split(":", 2) for line in text_of(proc / "cgroup").splitlines() if line.count(":") >= 2]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    version = 1 if controller in paths else 2
    own = PurePosixPath(paths.get(controller, paths.get("", "/")))
    for line in text_of(proc / "mountinfo").splitlines():
        place, _, form = line.partition(" - ")
        top, mount = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in place.split()[3:5])
        kind, *_, options = form.split(" ", 2)
        if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in options.split(",")):
            inside = own.relative_to(top).parts if own.is_relative_to(top) and ".." not in own.parts else ()
            below = root / mount.lstrip("/")
            return [below.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)], version
    return [], version


def cpu_quota(root: Path = ROOT) -> Quota | None:
    """The smallest CPU quota of this process's group and the groups around it; None = there is none."""
    folders, version = groups_of("cpu", root)
    names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    found = []
    for folder in folders:
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max" is no number
            quota, period = map(int, " ".join(text_of(folder / name) for name in names).split())
            found += [Quota(quota / period, folder / names[0])] if quota > 0 else []
    return min(found, default=None)


def cpuset(root: Path = ROOT) -> str:
    """The cores of this process's group, as `0-3,6`; "" = no file tells."""
    folders, version = groups_of("cpuset", root)
    names = ["cpuset.cpus.effective"] if version == 2 else ["cpuset.effective_cpus", "cpuset.cpus"]
    texts = (text_of(folder / name).strip() for folder in folders for name in names)
    return next(filter(None, texts), "")


def number_in(folder: Path, what: str) -> int:
    """The number in a file, or in its line that begins with a word; 0 = there is none, or no limit ("max")."""
    name, _, key = what.partition(" ")
    lines = text_of(folder / name).splitlines()
    words = next((line.split() for line in lines if line.startswith(key and f"{key} ")), [])
    with contextlib.suppress(ValueError, IndexError):
        return int(words[-1])
    return 0


def text_of(path: Path) -> str:
    """A file's text; "" = it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
