"""Ranks of a dense sum in one thread, and configs of every form of compression."""

from __future__ import annotations

from typing import Any

import torch

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.testing.forms import SHAPES

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "fp16": {"name": "fp16"},
    "topk": {"name": "topk", "keep": 0.05},
    "topk of int8": {"name": "topk", "keep": 0.02, "values": "int8"},
    "powersgd": {"name": "powersgd"},
    "powersgd of int8": {"name": "powersgd", "rank": 3, "values": "int8"},
}


def members(config: str, world_size: int, **others: Any) -> list[DenseCompression]:
    settings = TowerCompressionConfig(**CONFIGS[config], **others)
    return [DenseCompression(settings, SHAPES, CPU) for _ in range(world_size)]
