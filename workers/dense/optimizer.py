"""The dense model's optimizer, by its config."""

from __future__ import annotations

import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.workers.config import TowerOptimizerConfig


def build_optimizer(config: TowerOptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch.optim's SGD, Adam or AdamW, fused; the rate is set anew before each step."""
    if not parameters:
        raise UserError("the model has no trainable parameters")
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum or 0.0, weight_decay=config.weight_decay, fused=True
        )
    kind: type[torch.optim.Adam] = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=config.lr,
        betas=config.betas or (0.9, 0.999),
        eps=1e-8 if config.eps is None else config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
