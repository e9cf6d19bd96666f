"""A model of layers in every form of compressed sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.dense.tower import Tower
from tests.support.towers import tower_of

SPLITS = [(0, 13), (13, 24)]
FORMS = {
    "none": TowerCompressionConfig(),
    "lossless": TowerCompressionConfig(name="lossless"),
    "bf16": TowerCompressionConfig(name="bf16"),
    "fp16": TowerCompressionConfig(name="fp16"),
    "int8": TowerCompressionConfig(name="int8"),
    "topk": TowerCompressionConfig(name="topk", keep=0.05, values="int8", warmup_steps=2),
    "powersgd": TowerCompressionConfig(name="powersgd", warmup_steps=2),
    "powersgd of int8": TowerCompressionConfig(name="powersgd", rank=3, values="int8", warmup_steps=2),
}


class Layers(nn.Module):
    """Large enough for every form: a matrix that PowerSGD thins and top-k leaves values out of; one layer unused."""

    def __init__(self, seed: int = 0, *, forgetful: bool = False) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.low, self.mid, self.top, self.unused = nn.Linear(15, 40), nn.Linear(40, 40), nn.Linear(40, 1), None
        if forgetful:
            self.unused = nn.Linear(40, 40)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=drawn) * 0.4 - 0.2)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.low(torch.cat([dense, *embeddings.values()], dim=1)).tanh()
        return self.top(self.mid(hidden).tanh())


def build(collective: Collective, form: str, *, forgetful: bool = False, **others: Any) -> Tower:
    model = Layers(collective.rank, forgetful=forgetful)
    return tower_of(model=model, collective=collective, compression=FORMS[form], **others)
