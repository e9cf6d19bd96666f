"""Ranks of a dense sum in one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardkeep.compression.tower.exchange import Sum


def drive(sums: Sequence[Sum]) -> tuple[list[torch.Tensor], Counter[str]]:
    """Runs all ranks' sums round by round; the totals, and the bytes each rank sent by part."""
    world_size, sent = len(sums), Counter[str]()
    exchanges = [next(one) for one in sums]
    while True:
        assert len({(e.packets.shape, str(e.parts)) for e in exchanges}) == 1, "a packet has one size on all ranks"
        for part, size in exchanges[0].parts.items():
            sent[part] += (world_size - 1) * size
        sent["all"] += (world_size - 1) * exchanges[0].packets.shape[-1]
        found: list[Any] = []
        for rank, one in enumerate(sums):
            rows = [e.packets[rank] if e.packets.ndim == 2 else e.packets for e in exchanges]
            try:
                found.append(one.send(torch.stack(rows)))
            except StopIteration as done:
                found.append(done.value)
        if isinstance(found[0], torch.Tensor):
            return found, sent
        exchanges = found
