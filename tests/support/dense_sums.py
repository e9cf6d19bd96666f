"""Ranks of a dense sum in one thread; configs of every form of compression, and gradients of some shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression
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


CPU = torch.device("cpu")


SHAPES = {"wide": (40, 90), "bias": (40,), "tall": (130, 33), "one": (1,), "none": (0, 5)}


CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "lossless": {"name": "lossless"},
    "fp16": {"name": "fp16"},
    "topk": {"name": "topk", "keep": 0.05},
    "topk of int8": {"name": "topk", "keep": 0.02, "values": "int8"},
    "powersgd": {"name": "powersgd"},
    "powersgd of int8": {"name": "powersgd", "rank": 3, "values": "int8"},
}


def members(config: str, world_size: int, **others: Any) -> list[DenseCompression]:
    settings = TowerCompressionConfig(**CONFIGS[config], **others)
    return [DenseCompression(settings, SHAPES, CPU) for _ in range(world_size)]


def draw(step: int, rank: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    grads = {name: torch.randn(shape, generator=drawn) * size for name, shape in SHAPES.items()}
    grads["wide"] += torch.randn(40, 1, generator=drawn) @ torch.randn(1, 90, generator=drawn) * size
    return grads
