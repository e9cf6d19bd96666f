"""One rank's tower for the others: its parameters at a start, its whole state where ranks lack theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardkeep.workers.dense.state_tree import joined, split
from shardkeep.workers.dense.tower import Tower


def share(tower: Tower, source: int, lacking: Sequence[int]) -> None:
    """Gives the state of rank `source` to the ranks that lack it. Every rank calls it, after `Tower.join`; blocks."""
    if not lacking:
        return
    collective = tower.collective
    tensors: dict[str, torch.Tensor] = {}
    mine = split(tower.state_dict(), tensors)
    shapes = [(key, list(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()]
    state, shapes = collective.broadcast_object([mine, shapes], source=source, purpose="agreements")
    for key, shape, dtype in shapes:
        if collective.rank != source:
            tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[key] = tensors[key].cpu()
        if tensors[key].numel():
            collective.broadcast(tensors[key], source=source, purpose="agreements")
    if collective.rank in lacking:
        tower.load_state_dict(joined(state, tensors))
