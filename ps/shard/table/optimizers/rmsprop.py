"""RMSprop as the registry knows it; its kernel is in rmsprop_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import RmspropConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: RmspropConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate, config.weight_decay * update.decay_share, config.eps, 1.0 - config.alpha


ENTRY = RowOptimizer(
    config=RmspropConfig,
    kernels="shardkeep.ps.shard.table.optimizers.rmsprop_kernels",
    num_slots=lambda dim: dim,
    scalars=_scalars,
)
