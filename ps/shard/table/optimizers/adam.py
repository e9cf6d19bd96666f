"""Adam as the registry knows it; its kernel is in adam_kernels.py."""

from __future__ import annotations

import math

from shardkeep.ps.config import AdamConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: AdamConfig, update: Update) -> Scalars:
    beta1, beta2 = config.betas
    t = update.earlier_steps + update.step + 1
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    root = math.sqrt(1.0 - beta2**t)
    eps = config.eps * root if config.eps_after_correction else config.eps  # sqrt(v) / root + eps, times root
    rate = rate * root / (1.0 - beta1**t)
    return rate, config.weight_decay * update.decay_share, eps, 1.0 - beta1, 1.0 - beta2


ENTRY = RowOptimizer(
    config=AdamConfig,
    kernels="shardkeep.ps.shard.table.optimizers.adam_kernels",
    num_slots=lambda dim: 2 * dim,
    scalars=_scalars,
)
