"""LAMB as the registry knows it; its kernel is in lamb_kernels.py."""

from __future__ import annotations

import math

from shardkeep.ps.config import LambConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: LambConfig, update: Update) -> Scalars:
    beta1, beta2 = config.betas
    t = update.earlier_steps + update.step + 1
    root = math.sqrt(1.0 - beta2**t)
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    correction = root / (1.0 - beta1**t)
    eps = config.eps * root  # sqrt(v) / root + eps, times root
    return rate, config.weight_decay * update.decay_share, eps, 1.0 - beta1, 1.0 - beta2, correction


ENTRY = RowOptimizer(
    config=LambConfig,
    kernels="shardkeep.ps.shard.table.optimizers.lamb_kernels",
    num_slots=lambda dim: 2 * dim,
    scalars=_scalars,
)
