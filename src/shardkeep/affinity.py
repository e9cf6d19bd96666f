"""Which cores the processes of a job on this machine are pinned to: the setting, the launcher's choice, the pinning."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings

Cores = tuple[int, ...]
Pins = Mapping[tuple[str, int], Cores]
"""(role, index) -> its cores; who is not in it runs where the system puts it."""

SHORT: dict[str, dict[str, bool]] = {"none": {}, "auto": {"auto": True}}


class AffinityConfig(Settings):
    """Cores for the processes that `shardkeep train` starts: `none`, `auto`, or lists of cores by role, as in
    `{workers: [[0], [1]], servers: [[2, 3]]}`. For roles started by hand use `taskset`."""

    auto: bool = False
    """The launcher chooses: each process gets cores of its own if there are enough, else only workers do."""
    servers: list[list[int]] = Field(default_factory=list)
    """Cores of each server, one list per server; fewer lists are used in turn. Empty = not pinned."""
    workers: list[list[int]] = Field(default_factory=list)
    """Cores of each worker, likewise; with servers: 0, of the one process."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if isinstance(given, (Mapping, AffinityConfig)):
            return given
        if isinstance(given, str) and given in SHORT:
            return SHORT[given]
        raise ValueError("allowed: none, auto, or cores by role, as in {workers: [[0], [1]], servers: [[2, 3]]}")

    @field_validator("servers", "workers")
    @classmethod
    def _real_cores(cls, lists: list[list[int]]) -> list[list[int]]:
        for cores in lists:
            if not cores:
                raise ValueError("a list is empty; allowed: at least one core in each")
            if min(cores) < 0 or len(set(cores)) < len(cores):
                raise ValueError(f"{cores}; allowed: numbers of cores from 0, each once in a list")
        return lists

    @model_validator(mode="after")
    def _chosen_or_given(self) -> AffinityConfig:
        if self.auto and (self.servers or self.workers):
            raise ValueError("auto chooses the cores; allowed: auto, or lists of cores")
        return self

    @property
    def wanted(self) -> bool:
        """Whether anything is to be pinned."""
        return self.auto or bool(self.servers) or bool(self.workers)


def check_counts(affinity: AffinityConfig, *, servers: int, workers: int) -> None:
    """Raises ValueError where a list of cores would be for nobody."""
    for role, count in (("servers", servers), ("workers", workers)):
        given = len(getattr(affinity, role))
        if given > count:
            raise ValueError(
                f"affinity.{role}: lists of cores for {given}, there are {count}; allowed: at most one list for each"
            )


def choose(affinity: AffinityConfig, *, servers: int, workers: int, threads: int) -> Pins:
    """The cores of each process of the job; empty where nothing is pinned.

    Raises ConfigError: a core is not this process's to use, or the platform pins nothing.
    """
    if not affinity.wanted:
        return {}
    usable = usable_cores()
    if affinity.auto:
        return spread(usable, servers=servers, workers=workers, threads=threads)
    for role in ("servers", "workers"):
        for core in (core for cores in getattr(affinity, role) for core in cores):
            if core not in usable:
                raise ConfigError(f"launch.affinity.{role}: there is no core {core} to use; allowed: {shown(usable)}")
    return _in_turn("server", affinity.servers, servers) | _in_turn("worker", affinity.workers, workers)


def spread(usable: Sequence[int], *, servers: int, workers: int, threads: int) -> dict[tuple[str, int], Cores]:
    """What `auto` chooses among the `usable` cores.

    Where each worker can have `threads` cores and each server one, nobody shares any, and cores left over are dealt
    out, workers first. Where they do not suffice, workers are pinned in turn and servers run in the gaps.
    """
    members = [("worker", index) for index in range(workers)] + [("server", index) for index in range(servers)]
    if servers == 0:
        return {}  # one process: its prefetch thread would share the core of the tower
    if len(usable) < workers * threads + servers:
        width = min(threads, len(usable))
        return {("worker", i): _cut(usable, i * width, width) for i in range(workers)}
    counts = {member: threads if member[0] == "worker" else 1 for member in members}
    for number in range(len(usable) - sum(counts.values())):
        counts[members[number % len(members)]] += 1
    ahead = iter(usable)
    return {member: tuple(next(ahead) for _ in range(count)) for member, count in counts.items()}


def _cut(usable: Sequence[int], start: int, width: int) -> Cores:
    return tuple(sorted(usable[(start + k) % len(usable)] for k in range(width)))


def _in_turn(role: str, lists: Sequence[Sequence[int]], count: int) -> dict[tuple[str, int], Cores]:
    return {(role, i): tuple(sorted(lists[i % len(lists)])) for i in range(count)} if lists else {}


def usable_cores() -> Cores:
    """The cores this process may run on. Raises ConfigError where the platform pins nothing."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"launch.affinity: {sys.platform} cannot pin a process to cores; allowed: none")
    return tuple(sorted(os.sched_getaffinity(0)))


def own_cores() -> str | None:
    """The cores this process may run on, as `0-1`; None where the platform does not tell."""
    return shown(usable_cores()) if hasattr(os, "sched_getaffinity") else None


def pin(pid: int, cores: Cores) -> None:
    """Pins the main thread of a process (0 = the calling thread) and every thread that it starts from now on."""
    os.sched_setaffinity(pid, cores)


@contextlib.contextmanager
def pinned(cores: Cores | None) -> Iterator[None]:
    """Inside, the calling thread and those it starts are pinned to `cores`; None pins nothing."""
    if cores is None:
        yield
        return
    before = usable_cores()
    pin(0, cores)
    try:
        yield
    finally:
        pin(0, before)


def describe(pins: Pins) -> str:
    """`worker 0 on core 0; server 0 on cores 1-2`; what is not pinned is not named."""
    told = [
        f"{role} {index} on core{'s' if len(cores) > 1 else ''} {shown(cores)}" for (role, index), cores in pins.items()
    ]
    return "; ".join(told) or "nobody is pinned"


def shown(cores: Sequence[int]) -> str:
    """Numbers of cores as a person writes them: `0-3,6`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
