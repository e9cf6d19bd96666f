"""Ranks as real processes: what a function of this module's caller finds in each of them."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from shardkeep.base.deadlines import Deadline
from tests.support.forked import fork_context


@contextlib.contextmanager
def in_processes(target: Callable[..., None], world_size: int, *, limit_s: float) -> Iterator[list[dict[Any, Any]]]:
    """What each process puts into its queue, in rank order; `target(rank, port of a store, queue)` runs in each. The
    processes live until the `with` ends."""
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    members = [context.Process(target=target, args=(rank, store.port, results)) for rank in range(world_size)]
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
