"""Adagrad as the registry knows it; its kernel is in adagrad_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import AdagradConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: AdagradConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate, config.weight_decay * update.decay_share, config.eps


ENTRY = RowOptimizer(
    config=AdagradConfig,
    kernels="shardkeep.ps.shard.table.optimizers.adagrad_kernels",
    num_slots=lambda dim: dim,
    scalars=_scalars,
    initial_slot=lambda config: config.initial_accumulator,
)
