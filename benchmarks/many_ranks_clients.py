"""The ranks of many_ranks.py: hundreds in a process, which share its RPC agent. Reads commands from stdin.

A rank is a member of the job at the coordinator, with registration, heartbeats and resume ranges of its own, and a
`RowClient`, whose messages carry its rank. A process joins the RPC group as its first rank; for the others it writes
into the store what torch looks for there, and calls each server once per rank, as workers do on arrival. A step is a
worker's, without data, tower and dense sum: wait for the rows, push, pull the step that the window has room for. After
the loss of a generation the ranks join the next one, and train again from the step where it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch.distributed import PrefixStore, rpc  # type: ignore[attr-defined]

from shardkeep.assembly.kernel_needs import needed_kernels
from shardkeep.assembly.worker import kept_steps
from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.errors import TransportError
from shardkeep.config import parse_config
from shardkeep.loop.joining import row_client, tables_of
from shardkeep.member.access import endpoint_of
from shardkeep.member.group import join_group, join_store
from shardkeep.ps.client.pull import PullHandle
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation, Offer, ResumeRange
from shardkeep.ps.rpc.calls import arrive
from shardkeep.ps.rpc.group import RpcGroup

LIMIT_S = 600.0
IDS, SKEW = 10_000_000, 1.05
DRAWS = 64
"""Different sets of ids, which all ranks and steps share: drawing them is no server's work."""


def zipf_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` different ids by Zipf's law, sorted, spread over all 64-bit numbers."""
    places = np.empty(0, dtype=np.int64)
    while places.size < count:
        flat = 1 + rng.random(2 * count) * (IDS ** (1 - SKEW) - 1)
        places = np.union1d(places, np.minimum(flat ** (1 / (1 - SKEW)), IDS).astype(np.int64))
    return np.sort(rng.permutation(places)[:count] * 0x1E3779B97F4A7C15)  # odd: no two places have one product


class Ranks:
    """Ranks `first` to `last` of a job. Each command blocks until all of them are done."""

    def __init__(self, run: Path, first: int, last: int, *, rows: int) -> None:
        endpoint = endpoint_of(str(run))
        self._ranks = range(first, last)
        self._controls = [ControlClient(endpoint, role="worker", index=r, timeout_s=LIMIT_S) for r in self._ranks]
        self._rows = rows

    def form(self) -> harness.Figures:
        """Joins the job, and the group of its first generation."""
        self._config = config = parse_config(self._controls[0].register(), origin="the coordinator", judged="nothing")
        load_kernels(needed_kernels(config, "client"))
        self._tables = tables_of(config)
        self._offer = Offer(tuple(self._tables), settings=config.agreed())
        formation = self._each(self._join)
        group = self._enter(formation)
        self._clients = [
            row_client(config, group, self._tables, rank=rank, generation=formation.generation) for rank in self._ranks
        ]
        rng, ids = np.random.default_rng(0), self._rows * config.servers // len(self._tables)
        names = [table.name for table in self._tables]
        drawn = [{name: zipf_ids(rng, ids) for name in names} for _ in range(DRAWS)]
        self._requests = [self._clients[0].request(each) for each in drawn]
        grads = rng.normal(scale=1e-3, size=(ids, self._tables[0].dim)).astype(np.float32)
        self._grads = dict.fromkeys(names, grads)
        self._begin(formation)
        return {}

    def step(self) -> harness.Figures:
        """One step of every rank. The pulls of the following ones are under way at its end."""
        self._train()
        return {}

    def survive(self) -> harness.Figures:
        """Steps until a generation is lost and the next one has trained its first step."""
        before = self._formation.generation
        while self._formation.generation == before:
            try:
                self._train()
            except TransportError as error:
                reached = self._step
                self._rejoin(str(error))
        start = self._step
        self._train()
        return {"trained at": time.monotonic(), "start step": start, "again": reached - start}

    def leave(self) -> harness.Figures:
        if self._ranks[0] == 0:
            self._controls[0].report("summary", {"steps": self._step})
        self._each(lambda control: control.leave(0))
        return {}

    def _join(self, control: ControlClient) -> Formation:
        if not control.job:
            control.register(wait_s=LIMIT_S)
        control.start_heartbeats(patience_s=LIMIT_S, members=self._config.servers + self._config.workers)
        return control.join(self._offer)

    def _rejoin(self, why: str) -> None:
        first = max(0, self._step - kept_steps(self._config))
        offer = Offer(self._offer.tables, resume_range=ResumeRange(first, self._step, holds=True))
        self._group.close()

        def again(control: ControlClient) -> Formation:
            formation = control.join_again(offer, self._formation, why)
            assert formation is not None
            return formation

        formation = self._each(again)
        group = self._enter(formation)
        for client in self._clients:
            client.regroup(group, formation.generation, formation.start_step)
        self._begin(formation)

    def _begin(self, formation: Formation) -> None:
        self._formation, self._step = formation, formation.start_step
        self._in_flight: list[deque[PullHandle]] = [deque() for _ in self._ranks]

    def _enter(self, formation: Formation) -> RpcGroup:
        """Joins the group, with one agent for all ranks."""
        control, config = self._controls[0], self._config
        store = join_store(config, formation, control.lost)
        keys = PrefixStore(f"rpc/{formation.generation}", store)
        keys.set_timeout(timedelta(seconds=LIMIT_S))
        names, addresses = PrefixStore("names", keys), PrefixStore("addrs", keys)  # as tensorpipe_agent.cpp has them
        for rank in self._ranks[1:]:
            name = f"worker{rank}-with-{self._ranks[0]}"
            names.set(str(config.servers + rank), name)
            addresses.set(name, "nobody calls a worker")
            keys.set(f"worker {rank}", "is here")
        host = control.member.host
        self._group = group = join_group(config, formation, "worker", self._ranks[0], host, None, lost=control.lost)
        servers, probe = [group.server_name(server) for server in range(config.servers)], torch.zeros(1)
        arrivals = [
            rpc.rpc_async(name, arrive, args=(rank, probe), timeout=LIMIT_S)
            for name in servers
            for rank in self._ranks[1:]
        ]
        for arrival in arrivals:
            arrival.wait()
        return group

    def _train(self) -> None:
        """As a worker's pipeline, but each part for all ranks before the next: none waits for another's reply."""
        step, window = self._step, self._config.consistency.window
        for rank, client, in_flight in zip(self._ranks, self._clients, self._in_flight, strict=True):
            for ahead in range(step + len(in_flight), step + window):
                in_flight.append(client.pull(ahead, self._request(rank, ahead)))
        pulls = [in_flight.popleft() for in_flight in self._in_flight]
        for pull in pulls:
            pull.result()
        sync = self._config.consistency.mode == "sync"
        for rank, client, in_flight, pull in zip(self._ranks, self._clients, self._in_flight, pulls, strict=True):
            if sync:
                client.push(step, pull.request, self._grads, pulls=(pull,))
            else:
                later = step + window, self._request(rank, step + window)
                in_flight.append(client.exchange(step, pull.request, self._grads, *later, pulls=(pull,)))
        if sync:
            for rank, client, in_flight in zip(self._ranks, self._clients, self._in_flight, strict=True):
                in_flight.append(client.pull(step + 1, self._request(rank, step + 1)))
        self._step += 1
        for control in self._controls:
            control.update(step=step, phase="training")

    def _request(self, rank: int, step: int) -> Any:
        return self._requests[(7 * rank + 11 * step) % DRAWS]

    def _each(self, act: Callable[[ControlClient], Any]) -> Any:
        """Runs an act for each rank, each in a thread; the first result, or the first error."""
        results: list[Any] = [None] * len(self._controls)

        def run(at: int) -> None:
            try:
                results[at] = act(self._controls[at])
            except Exception as error:
                results[at] = error

        threads = [threading.Thread(target=run, args=(at,)) for at in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in results:
            if isinstance(error, Exception):
                raise error
        return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("--smoke", action="store_true", help="no difference: commands say how long it runs")
    options = parser.parse_args()
    threading.stack_size(512 * 1024)
    ranks = Ranks(options.run, options.first, options.last, rows=options.rows)
    harness.settle_garbage_collector()
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(ranks, line.strip())()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
