"""What `threads: auto` and `launch.affinity` mean on this machine: threads and cores of the roles that it runs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.topology import Cores, Topology, read_topology, shown
from shardkeep.config.affinity import Pins

if TYPE_CHECKING:
    from shardkeep.config import JobConfig

CORES_BESIDE_SERVERS = 8
"""Of so many cores one is left to a server: all servers take at most a seventh of what the workers compute."""


def worker_threads(config: JobConfig, topology: Topology | None = None) -> int:
    """The threads of each worker's dense model if all roles of the job run on this machine. `topology`: None = its own.

    `auto` divides the physical cores of a NUMA node by its workers, and leaves servers one core in eight. With lists of
    cores it divides these. All workers together have at most as many threads as the quota has whole cores.
    """
    if config.threads != "auto":
        return config.threads
    topology, workers = topology or read_topology(), max(1, config.workers)
    if lists := config.launch.affinity.workers:
        places = [place for places in topology.nodes.values() for place in places]
        counts = [sum(not set(place).isdisjoint(cores) for place in places) for cores in lists]
        shares = [count * len(lists) // max(workers, len(lists)) for count in counts]
    else:
        shares = []
        for node, (here, servers) in _members(config, topology, topology.nodes).items():
            count = len(topology.nodes[node])
            shares.append((count - min(len(servers), count // CORES_BESIDE_SERVERS)) // len(here))
    return max(1, min(*shares, (topology.quota_cores or len(topology.cores)) // workers))


def threads_of_role(config: JobConfig, environment: Mapping[str, str] = os.environ) -> int:
    """The threads of the dense model in this process, a worker. `auto`: those that its launcher sets as
    OMP_NUM_THREADS; without it, by the cores that this process may use."""
    told = environment.get("OMP_NUM_THREADS", "")
    if config.threads == "auto" and told.isdecimal() and int(told):
        return int(told)
    return worker_threads(share_of(config, servers=0, workers=1))


def share_of(config: JobConfig, *, servers: int, workers: int) -> JobConfig:
    """The job as if it had these processes of it alone: those that one of several machines runs."""
    return config.model_copy(update={"servers": servers, "workers": workers})


def choose(config: JobConfig, topology: Topology | None = None) -> Pins:
    """The cores of each process of a job that runs on this machine; empty where nothing is pinned.

    Raises ConfigError: a core is not this process's to use, or the platform pins nothing.
    """
    affinity = config.launch.affinity
    if not affinity.wanted:
        return {}
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"launch.affinity: {sys.platform} cannot pin a process to cores; allowed: none")
    topology = topology or read_topology()
    if not affinity.auto:
        return _given(config, topology.cores)
    if topology.quota_cores is not None:
        return {}  # another job with a quota would choose the same cores
    nodes, threads = topology.nodes, worker_threads(config, topology)
    if all(threads > sum(map(len, places)) for places in nodes.values()):
        nodes = {0: [place for places in nodes.values() for place in places]}  # no node is large enough
    pins: dict[tuple[str, int], Cores] = {}
    for node, (workers, servers) in _members(config, topology, nodes).items():
        if len(nodes) > 1:
            roles = [("server", i) for i in servers] or [("worker", i) for i in workers]
            pins |= dict.fromkeys(roles, _cut(nodes[node]))
        if config.servers:  # in one process, the prefetch thread would share the core of the tower
            pins |= spread(nodes[node], workers=workers, servers=servers, threads=threads)
    return dict(sorted(pins.items(), key=lambda pin: (pin[0][0] == "server", pin[0][1])))


def spread(
    places: Sequence[Cores], *, workers: Sequence[int], servers: Sequence[int], threads: int
) -> dict[tuple[str, int], Cores]:
    """What `auto` chooses among the physical cores of a node, for the workers and servers there, by their indices.

    Where each worker can have `threads` physical cores and each server one, nobody shares any, and cores left over are
    dealt out, workers first. Where they do not suffice, workers are pinned in turn, to SMT siblings last, and servers
    run in the gaps.
    """
    members = [("worker", index) for index in workers] + [("server", index) for index in servers]
    if len(places) < len(workers) * threads + len(servers):
        if len(places) < len(workers) * threads:
            ranks = range(max(map(len, places)))
            places = [place[rank : rank + 1] for rank in ranks for place in places if rank < len(place)]
        width = min(threads, len(places))
        return {("worker", index): _cut(places, i * width, width) for i, index in enumerate(workers)}
    counts = [threads if role == "worker" else 1 for role, _ in members]
    for number in range(len(places) - sum(counts)):
        counts[number % len(members)] += 1
    starts = accumulate(counts, initial=0)
    return {member: _cut(places, start, count) for member, start, count in zip(members, starts, counts, strict=False)}


def start_lines(config: JobConfig) -> Iterator[tuple[str, str]]:
    """What the start of a job says of cores, by phase: pins and threads where the config asks for them, and a warning.
    Raises as `choose`."""
    topology = read_topology()
    if config.launch.affinity.wanted:
        shared = " (a quota is time on all cores)" if config.launch.affinity.auto and topology.quota_cores else ""
        yield "affinity", describe(choose(config, topology)) + shared
    if config.threads == "auto":
        yield "threads", f"{worker_threads(config, topology)} for each worker, of {machine_text(topology)}"
    if warning := over_quota(config, topology):
        yield "warning", warning


def over_quota(config: JobConfig, topology: Topology | None = None) -> str:
    """The warning of more threads of workers than the quota has whole cores; "" = there are none."""
    topology = topology or read_topology()
    threads, most, quota = worker_threads(config, topology), topology.quota_cores, topology.quota
    if quota is None or most is None or config.workers * threads <= most:
        return ""
    fewer = "fewer workers" if threads == 1 else "fewer workers, or threads: auto"
    total = config.workers * threads
    return f"{total} threads of workers share a quota of {quota.cores:g} cores ({quota.file}); allowed: {fewer}"


def machine_text(topology: Topology) -> str:
    """`32 cores with 64 hardware threads, 2 NUMA nodes, a quota of 6.5`; what does not matter is not named."""
    physical, threads = sum(map(len, topology.nodes.values())), len(topology.cores)
    text = f"{physical} core{'s' if physical > 1 else ''}"
    text += f" with {threads} hardware threads" if threads > physical else ""
    text += f", {len(topology.nodes)} NUMA nodes" if len(topology.nodes) > 1 else ""
    return text + (f", a quota of {topology.quota.cores:g}" if topology.quota and topology.quota_cores else "")


def describe(pins: Pins) -> str:
    """`worker 0 on core 0; server 0 on cores 1-2`; what is not pinned is not named."""
    told = [
        f"{role} {index} on core{'s' if len(cores) > 1 else ''} {shown(cores)}" for (role, index), cores in pins.items()
    ]
    return "; ".join(told) or "nobody is pinned"


def _members(
    config: JobConfig, topology: Topology, nodes: Mapping[int, Sequence[Cores]]
) -> dict[int, tuple[list[int], list[int]]]:
    """The workers and servers of each node that has workers, by index. A worker is on the node of its GPU, else on that
    with most cores for each worker; servers are dealt out beside the workers."""
    gpus, workers = topology.gpu_nodes, max(1, config.workers)
    if config.tower.device == "cpu" or (config.tower.device == "auto" and len(gpus) < workers):
        gpus = ()
    homes: list[int] = []
    counts = Counter[int]()
    for index in range(workers):
        near = gpus[index % len(gpus)] if gpus else -1
        homes.append(near if near in nodes else max(nodes, key=lambda node: len(nodes[node]) / (counts[node] + 1)))
        counts[homes[-1]] += 1
    found: dict[int, tuple[list[int], list[int]]] = {node: ([], []) for node in homes}
    for index, node in enumerate(homes):
        found[node][0].append(index)
    for index in range(config.servers):
        found[homes[index % workers]][1].append(index)
    return found


def _given(config: JobConfig, usable: Sequence[int]) -> Pins:
    """The lists of the config, in turn."""
    affinity = config.launch.affinity
    for role in ("servers", "workers"):
        for core in (core for cores in getattr(affinity, role) for core in cores):
            if core not in usable:
                raise ConfigError(f"launch.affinity.{role}: there is no core {core} to use; allowed: {shown(usable)}")
    roles = ("server", affinity.servers, config.servers), ("worker", affinity.workers, config.workers)
    return {
        (role, i): tuple(sorted(lists[i % len(lists)])) for role, lists, count in roles if lists for i in range(count)
    }


def _cut(places: Sequence[Cores], start: int = 0, width: int | None = None) -> Cores:
    """The cores of `width` physical cores from one on, beyond the last the first again; None = of all."""
    taken = range(start, start + (len(places) if width is None else width))
    return tuple(sorted(core for k in taken for core in places[k % len(places)]))
