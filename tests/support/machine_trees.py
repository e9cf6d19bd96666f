"""Recorded machines: the files of /proc and /sys that tell of cores, below a folder of the test that stands for /."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.base.machine.topology import numbers_of
from tests.support.control_groups import Groups


@dataclass(frozen=True)
class Recorded:
    """What a machine's files say of its cores, in the lists of the kernel (`0-3,6`).

    `siblings`, `l3`: lists of cores that share a physical core, or an L3 cache. `nodes`: by number. `gpus`: the node by
    PCI address. `lines`, `mounts`, `groups`: see `Groups`."""

    online: str = ""
    allowed: str = ""
    siblings: Sequence[str] = ()
    l3: Sequence[str] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    lines: str = ""
    mounts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    siblings_file: str = "core_cpus_list"

    def write(self, root: Path) -> Path:
        cpus = root / "sys/devices/system/cpu"
        files = {cpus / "online": self.online}
        if self.allowed:
            status = f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{self.allowed}\nMems_allowed_list:\t0"
            files[root / "proc/thread-self/status"] = status
        for cores in self.siblings:
            files |= {cpus / f"cpu{core}/topology/{self.siblings_file}": cores for core in numbers_of(cores)}
        for cores in self.l3:
            for core in numbers_of(cores):
                cache = cpus / f"cpu{core}/cache"
                files |= {cache / "index0/level": "1", cache / "index0/shared_cpu_list": str(core)}
                files |= {cache / "index3/level": "3", cache / "index3/shared_cpu_list": cores}
        for node, cores in self.nodes.items():
            files[root / f"sys/devices/system/node/node{node}/cpulist"] = cores
        for address, node in self.gpus.items():
            files[root / f"proc/driver/nvidia/gpus/{address}/information"] = "Model: a GPU"
            files[root / f"sys/bus/pci/devices/{address}/numa_node"] = str(node)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        if self.lines:
            Groups(root, self.lines, self.mounts).write(self.groups)
        return root


LAPTOP = Recorded(
    online="0-7", allowed="0-7", siblings=["0-1", "2-3", "4-5", "6-7"], l3=["0-7"], nodes={0: "0-7"},
    lines="0::/user.slice", mounts={"all": ("/", "")},
    groups={"all/user.slice/cpuset.cpus.effective": "0-7", "all/user.slice/cpu.max": "max 100000"},
)  # fmt: skip
"""Four physical cores, whose siblings have neighbouring numbers."""
SERVER = Recorded(
    online="0-31", allowed="0-31", siblings=[f"{core},{core + 16}" for core in range(16)],
    l3=["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"], nodes={0: "0-7,16-23", 1: "8-15,24-31", 2: ""},
    gpus={"0000:ca:00.0": 0, "0000:17:00.0": 1},
)  # fmt: skip
"""Two sockets of eight physical cores in two L3 groups, whose siblings are numbered last; memory alone in node 2."""
CONTAINER = Recorded(
    online="0-7", allowed="0-7", siblings=[str(core) for core in range(8)], l3=["0-7"], nodes={0: "0-7"},
    lines="0::/", mounts={"all": ("/", "")}, groups={"all/cpu.max": "150000 100000"},
)  # fmt: skip
"""Of version 2, with the time of one and a half of eight cores."""
OLD_CONTAINER = Recorded(
    online="0-7", allowed="0-7", siblings=[str(core) for core in range(8)], l3=["0-7"], nodes={0: "0-7"},
    lines="4:cpuset:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/",
    mounts={"cpu": ("/docker/1", "cpu,cpuacct"), "set": ("/docker/1", "cpuset")},
    groups={"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000", "set/cpuset.cpus": "0-7"},
    siblings_file="thread_siblings_list",
)  # fmt: skip
"""The same of version 1, on a kernel with old names."""
VM = Recorded(online="0-3", allowed="0-3", siblings=["0", "1", "2", "3"], nodes={0: "0-3"}, gpus={"0000:00:05.0": -1})
"""Which hides caches and where its GPU is."""
NOTHING = Recorded()
