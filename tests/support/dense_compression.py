"""Compression of dense gradients for tests: configs of every form, and gradients of some shapes."""

from __future__ import annotations

from typing import Any

import torch

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression

CPU = torch.device("cpu")


SHAPES = {"wide": (40, 90), "bias": (40,), "tall": (130, 33), "one": (1,), "none": (0, 5)}


CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "lossless": {"name": "lossless"},
    "bf16": {"name": "bf16"},
    "fp16": {"name": "fp16"},
    "int8": {"name": "int8"},
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
