"""Adadelta as the registry knows it; its kernel is in adadelta_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import AdadeltaConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: AdadeltaConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate, config.weight_decay * update.decay_share, config.eps, 1.0 - config.rho


ENTRY = RowOptimizer(
    config=AdadeltaConfig,
    kernels="shardkeep.ps.shard.table.optimizers.adadelta_kernels",
    num_slots=lambda dim: 2 * dim,
    scalars=_scalars,
)
