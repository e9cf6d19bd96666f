"""Which cores the processes of a job on this machine are pinned to: the setting, and the pinning."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardkeep.base.machine.topology import Cores, shown, usable_cores
from shardkeep.base.settings import Settings

Pins = Mapping[tuple[str, int], Cores]
"""(role, index) -> its cores; who is not in it runs where the system puts it."""

SHORT: dict[str, dict[str, bool]] = {"none": {}, "auto": {"auto": True}}


class AffinityConfig(Settings):
    """Cores for the processes that `shardkeep train` starts: `none`, `auto`, or lists of cores by role, as in
    `{workers: [[0], [1]], servers: [[2, 3]]}`. For roles started by hand use `taskset`."""

    auto: bool = False
    """The launcher chooses: each process gets cores of its own within a node if there are enough, else workers."""
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
    before = tuple(os.sched_getaffinity(0))
    pin(0, cores)
    try:
        yield
    finally:
        pin(0, before)
