"""Which backend all ranks of a group use: the ranks agree through the store before they form the group."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

NCCL, GLOO = "nccl", "gloo"


def agreed_backend(store: Store, *, rank: int, world_size: int, usable: str, timeout_s: float) -> str:
    """Returns "nccl" if it is usable for every rank, else "gloo". Blocks until every rank has called it.

    Ranks with different backends would wait for each other until their deadline.

    Args:
        store: A store of this group alone.
        rank: This rank.
        world_size: Number of ranks.
        usable: The best backend that this rank can use: "nccl" needs a GPU that no other rank has.
        timeout_s: Deadline, seconds. torch raises DistStoreError when it is over.
    """
    keys = [f"backend/{each}" for each in range(world_size)]
    store.set(keys[rank], usable)
    store.wait(keys, timedelta(seconds=timeout_s))
    return NCCL if all(store.get(key) == NCCL.encode() for key in keys) else GLOO
