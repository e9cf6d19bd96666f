"""The ranks of a group use one backend: NCCL only if each of them can."""

from __future__ import annotations

import pytest
from torch.distributed import DistStoreError, HashStore

from shardkeep.workers.collectives.process_group import agreed_backend
from tests.support.cases import every
from tests.support.local_job import in_threads


@every(
    ("usable", "agreed"),
    [
        (("gloo", "gloo"), "gloo"),
        (("nccl", "nccl", "nccl"), "nccl"),
        (("nccl", "gloo"), "gloo"),
        (("gloo", "nccl", "nccl"), "gloo"),
    ],
)
def test_all_ranks_take_nccl_only_if_every_rank_can(usable: tuple[str, ...], agreed: str) -> None:
    store, size = HashStore(), len(usable)

    def ask(rank: int) -> str:
        return agreed_backend(store, rank=rank, world_size=size, usable=usable[rank], timeout_s=5.0)

    assert in_threads([lambda r=rank: ask(r) for rank in range(size)]) == [agreed] * size  # type: ignore[misc]


def test_a_rank_that_never_comes_ends_the_wait_at_the_deadline() -> None:
    with pytest.raises(DistStoreError):
        agreed_backend(HashStore(), rank=0, world_size=2, usable="nccl", timeout_s=0.2)
