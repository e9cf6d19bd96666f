"""The one reader of what this machine has to compute on: cores, SMT siblings, L3 groups, NUMA nodes, CPU quota, GPUs.

A core is what the system numbers: one hardware thread. Readers are functions of a folder: `/`, or one that looks so.
Sources: the kernel's Documentation/ABI/stable/sysfs-devices-system-cpu and -node, cgroups(7), proc_pid_status(5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.machine.control_groups import ROOT, Quota, cpu_quota, cpuset, text_of

Cores = tuple[int, ...]
_SYSTEM = "sys/devices/system"


@dataclass(frozen=True)
class Topology:
    """The cores that the calling thread may run on, and what limits and surrounds them."""

    nodes: Mapping[int, Sequence[Cores]]
    """By NUMA node its physical cores, each as its SMT siblings. Those with one L3 cache follow each other."""
    quota: Quota | None = None
    gpu_nodes: tuple[int, ...] = ()
    """The NUMA node of each GPU of NVIDIA's driver in the order of their PCI addresses; -1 = not known."""

    @property
    def cores(self) -> Cores:
        """All of them, ascending."""
        return tuple(sorted(core for places in self.nodes.values() for place in places for core in place))

    @property
    def quota_cores(self) -> int | None:
        """Whole cores that the quota pays for, at least 1; None = there is no quota, or it allows all cores."""
        if self.quota is None or self.quota.cores >= len(self.cores):
            return None
        return max(1, int(self.quota.cores))


def usable_cores(root: Path = ROOT) -> Cores:
    """The cores that the calling thread may run on, ascending: by its affinity, its cpuset and what is online.

    Where no file tells of `/`, the system is asked; any other folder that tells nothing has one core."""
    status = text_of(root / "proc/thread-self/status").partition("\nCpus_allowed_list:")[2].partition("\n")[0]
    found = numbers_of(status) or (_of_system() if root == ROOT else set())
    for text in (cpuset(root), text_of(root / _SYSTEM / "cpu/online")):
        each = numbers_of(text)
        found = found & each or found or each
    return tuple(sorted(found)) or (0,)


def read_topology(root: Path = ROOT) -> Topology:
    """All that the files below `root` tell. On a machine that tells nothing, each usable core stands alone in node 0.
    A file that is missing or makes no sense tells nothing."""
    usable, cpus = usable_cores(root), root / _SYSTEM / "cpu"
    physical = _lowest(usable, lambda core: _siblings(cpus / f"cpu{core}"))
    l3 = _lowest(usable, lambda core: _sharers(cpus / f"cpu{core}"))
    folders = (root / _SYSTEM / "node").glob("node[0-9]*")
    node_of = {core: int(path.name[4:]) for path in folders for core in numbers_of(text_of(path / "cpulist"))}
    places: dict[tuple[int, int, int], list[int]] = {}
    for core in usable:
        places.setdefault((node_of.get(core, 0), l3[core], physical[core]), []).append(core)
    nodes: dict[int, list[Cores]] = {}
    for (node, _, _), siblings in sorted(places.items()):
        nodes.setdefault(node, []).append(tuple(siblings))
    gpus = sorted(path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    near = (text_of(root / "sys/bus/pci/devices" / gpu / "numa_node").strip() for gpu in gpus)
    return Topology(nodes, cpu_quota(root), tuple(int(text) if text.isdecimal() else -1 for text in near))


def numbers_of(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it, `0-3,6`; none where it is no such list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or bool(dash) != last.isdecimal():
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def shown(cores: Iterable[int]) -> str:
    """The list of these numbers as the kernel and people write it: `0-3,6`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _lowest(usable: Cores, group_of: Callable[[int], set[int]]) -> dict[int, int]:
    """The lowest usable core of each core's group. Reads one list for each group: machines have hundreds of cores."""
    found: dict[int, int] = {}
    for core in usable:
        if core not in found:
            found |= dict.fromkeys({core, *group_of(core)} - found.keys(), core)
    return found


def _siblings(cpu: Path) -> set[int]:
    """The hardware threads of a core, under the new name or the old one."""
    return numbers_of(text_of(cpu / "topology/core_cpus_list") or text_of(cpu / "topology/thread_siblings_list"))


def _sharers(cpu: Path) -> set[int]:
    """The cores with the same L3 cache."""
    caches = (path for path in (cpu / "cache").glob("index*") if text_of(path / "level").strip() == "3")
    return set().union(*(numbers_of(text_of(path / "shared_cpu_list")) for path in caches))


def _of_system() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
