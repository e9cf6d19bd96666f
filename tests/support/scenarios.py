"""Scenarios of ranks that are real processes: one set of processes plays all, and each succeeds or fails alone."""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.workers.collectives.process_group import ProcessCollective
from tests.support.forked import fork_context

LIMIT_S = 60.0
"""Seconds that ranks wait for each other."""
_GENERATIONS = 10
"""That a scenario may form."""


class Rank:
    """One rank of a scenario. What it forms is closed when the scenario ends."""

    def __init__(self, store: dist.Store, number: int, world_size: int, first_generation: int) -> None:
        self.store, self.number, self.world_size = store, number, world_size
        self.generation = first_generation - 1
        """The last that was formed or skipped."""
        self._formed: list[ProcessCollective] = []

    def form(self, timeout_s: float = LIMIT_S, backend: str = "gloo") -> ProcessCollective:
        self.generation += 1
        collective = ProcessCollective(
            self.store,
            rank=self.number,
            world_size=self.world_size,
            generation=self.generation,
            timeout_s=timeout_s,
            backend=backend,
        )
        self._formed.append(collective)
        return collective

    def skip(self) -> None:
        """Leaves the next generation to the other ranks."""
        self.generation += 1

    def close(self) -> None:
        for collective in self._formed:
            collective.close()


Scenario = Callable[[Rank], Any]


class Found:
    """What the ranks returned, by scenario."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._values: dict[str, dict[int, Any]] = {}
        self._failures: dict[str, dict[int, str]] = {}

    def add(self, name: str, rank: int, value: Any, failure: str | None) -> None:
        if failure is None:
            self._values.setdefault(name, {})[rank] = value
        else:
            self._failures.setdefault(name, {})[rank] = failure

    def __getitem__(self, name: str) -> list[Any]:
        """In rank order. Raises AssertionError with the tracebacks where a rank failed in this scenario."""
        failures, values = self._failures.get(name, {}), self._values.get(name, {})
        assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        absent = set(range(self._world_size)) - values.keys()
        assert not absent, f"ranks {sorted(absent)} ended or hung before they finished {name!r}"
        return [values[rank] for rank in range(self._world_size)]


@contextlib.contextmanager
def played(scenarios: Mapping[str, Scenario], world_size: int, *, limit_s: float) -> Iterator[Found]:
    """Plays all scenarios, one after the other, in `world_size` processes, each with one thread. `scenarios` are
    functions at the top of a module: the processes import them."""
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    members = [
        context.Process(target=_play, args=(dict(scenarios), number, world_size, store.port, results))
        for number in range(world_size)
    ]
    for member in members:
        member.start()
    try:
        found, deadline, missing = Found(world_size), time.monotonic() + limit_s, world_size * len(scenarios)
        while missing and time.monotonic() < deadline:
            ended = [member.exitcode for member in members if member.exitcode is not None]
            try:
                found.add(*results.get(timeout=1.0))
                missing -= 1
            except queue.Empty:
                if any(ended) or len(ended) == len(members):  # a test of a scenario that was not finished says so
                    break
        yield found
    finally:
        for member in members:
            member.kill()
            member.join()


def _play(scenarios: dict[str, Scenario], number: int, world_size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    for at, (name, scenario) in enumerate(scenarios.items()):
        rank = Rank(store, number, world_size, 1 + at * _GENERATIONS)
        value, failure = None, None
        try:
            value = scenario(rank)
        except Exception:
            failure = traceback.format_exc()
        rank.close()
        results.put((name, number, value, failure))
        store.set(f"over {name} {number}", "")
        store.wait([f"over {name} {other}" for other in range(world_size)])  # none is in the next one before
