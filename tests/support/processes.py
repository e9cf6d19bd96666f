"""Ranks as real processes: what a function of this module's caller finds in each of them."""

from __future__ import annotations

import contextlib
import queue
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.base.deadlines import Deadline
from tests.support.forked import fork_context

Target = Callable[[int, Any], dict[Any, Any]]
"""Of a rank and a TCPStore."""


@contextlib.contextmanager
def in_processes(
    target: Target, world_size: int, *, limit_s: float, store_s: float = 100.0
) -> Iterator[list[dict[Any, Any]]]:
    """What `target` finds in each process, with its `rank`, in rank order. Each has one thread, and a client of one
    store, which waits for `store_s`."""
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    members = [
        context.Process(target=_run, args=(target, rank, store.port, store_s, results)) for rank in range(world_size)
    ]
    for member in members:
        member.start()
    try:
        found = _found(members, results, Deadline(limit_s))
        assert not [f["failed"] for f in found if "failed" in f], "\n".join(f.get("failed", "") for f in found)
        yield sorted(found, key=lambda f: f["rank"])
        for member in members:
            member.join(90)
    finally:
        for member in members:
            member.kill()
            member.join()


def _run(target: Target, rank: int, port: int, store_s: float, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=store_s))
        results.put({"rank": rank, **target(rank, store)})
    except BaseException:
        results.put({"rank": rank, "failed": traceback.format_exc()})


def _found(members: Sequence[Any], results: Any, deadline: Deadline) -> list[dict[Any, Any]]:
    """One entry of each process; fails at once when one ended without its own."""
    found: list[dict[Any, Any]] = []
    while len(found) < len(members):
        ended = [(rank, member.exitcode) for rank, member in enumerate(members) if member.exitcode]
        try:
            found.append(results.get(timeout=0.5))
        except queue.Empty:
            assert not ended, f"ended without a result (rank, exit code): {ended}; there are {len(found)} results"
            deadline.check(f"the results of {len(members)} processes; there are {len(found)}")
    return found
