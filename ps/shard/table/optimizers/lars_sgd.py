"""LARS as the registry knows it; its kernel is in lars_sgd_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import LarsSgdConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: LarsSgdConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate * config.eta, config.weight_decay * update.decay_share, config.momentum


ENTRY = RowOptimizer(
    config=LarsSgdConfig,
    kernels="shardkeep.ps.shard.table.optimizers.lars_sgd_kernels",
    num_slots=lambda dim: dim,
    scalars=_scalars,
)
