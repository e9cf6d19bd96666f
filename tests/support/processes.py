"""Ranks as real processes: what a function of this module's caller finds in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

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
        found = [results.get(timeout=limit_s) for _ in members]
        assert not [f["failed"] for f in found if "failed" in f], "\n".join(f.get("failed", "") for f in found)
        yield sorted(found, key=lambda f: f["rank"])
        for member in members:
            member.join(30)
    finally:
        for member in members:
            member.kill()
            member.join()
