"""Row-wise Adagrad as the registry knows it; its kernel is in rowwise_adagrad_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import RowwiseAdagradConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: RowwiseAdagradConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate, config.weight_decay * update.decay_share, config.eps


ENTRY = RowOptimizer(
    config=RowwiseAdagradConfig,
    kernels="shardkeep.ps.shard.table.optimizers.rowwise_adagrad_kernels",
    num_slots=lambda dim: 1,
    scalars=_scalars,
    initial_slot=lambda config: config.initial_accumulator,
)
