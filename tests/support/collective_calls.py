"""Every call of a collective of three ranks, and what each rank gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.workers.collectives.collective import (
    Collective,
)
from shardkeep.workers.collectives.operations import (
    all_gather,
    all_reduce_sum,
    begin_all_gather,
    broadcast_object,
    exchange_packets,
    gather_arrays,
)

WORLD = 3


def every_call(collective: Collective) -> list[Any]:
    """What this rank gets from each call, in plain values."""
    rank = collective.rank
    later = begin_all_gather(collective, torch.tensor([rank]), purpose="agreements")
    summed = torch.tensor([1.0, 10.0 * rank])
    all_reduce_sum(collective, summed, purpose="agreements")
    sent = torch.tensor([7 if rank == 0 else 0])
    collective.broadcast(sent)
    collective.barrier(timeout_s=90.0)
    arrays = gather_arrays(collective, np.arange(rank * 3, dtype=np.float32), purpose="agreements")
    none = gather_arrays(collective, np.empty(0, np.int64), purpose="agreements")
    return [
        all_gather(collective, torch.full((2, 1), rank), purpose="agreements").tolist(),
        all_gather(collective, torch.empty(0), purpose="agreements").shape,
        summed.tolist(),
        sent.tolist(),
        broadcast_object(collective, {"on": True, "why": "ä"} if rank == 0 else None, purpose="agreements"),
        [(a.dtype.str, a.tolist()) for a in arrays],
        [(a.dtype.str, a.size) for a in none],
        exchange_packets(
            collective, Exchange(torch.tensor([rank, 50], dtype=torch.uint8)), purpose="agreements"
        ).tolist(),
        exchange_packets(
            collective, Exchange(10 * rank + torch.arange(3, dtype=torch.uint8).view(3, 1)), purpose="agreements"
        )
        .view(-1)
        .sub(rank)
        .tolist(),
        later().tolist(),
    ]


EXPECTED = [
    [[[0], [0]], [[1], [1]], [[2], [2]]],
    torch.Size([3, 0]),
    [3.0, 30.0],
    [7],
    {"on": True, "why": "ä"},
    [("<f4", []), ("<f4", [0.0, 1.0, 2.0]), ("<f4", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])],
    [("<i8", 0)] * 3,
    [[0, 50], [1, 50], [2, 50]],
    [0, 10, 20],
    [[0], [1], [2]],
]
