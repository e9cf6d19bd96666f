"""Files of control groups as the kernel shows them, below a folder of the test that stands for /."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Groups:
    """A process's view of its control groups.

    Args:
        lines: /proc/self/cgroup.
        mounts: By folder below `groups`: the root of the mount, and its controllers; "" = version 2.
    """

    def __init__(self, folder: Path, lines: str, mounts: Mapping[str, tuple[str, str]]) -> None:
        self.root, proc = folder, folder / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(lines + "\n")
        places = ["20 1 0:1 / / rw - ext4 /dev/sda rw"]
        for name, (root, controllers) in mounts.items():
            place = f"/groups/{name}".replace(" ", "\\040")
            form = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw"
            places.append(f"31 20 0:28 {root} {place} rw,relatime shared:5 - {form}")
        (proc / "mountinfo").write_text("\n".join(places) + "\n")

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            self.path(name).write_text(text + "\n")

    def path(self, name: str) -> Path:
        return self.root / "groups" / name
