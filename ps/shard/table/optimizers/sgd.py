"""SGD as the registry knows it; its kernel is in sgd_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import SgdConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: SgdConfig, update: Update) -> Scalars:
    rate = config.lr * update.lr_factor * config.schedule.factor(update.step)
    return rate, config.weight_decay * update.decay_share


ENTRY = RowOptimizer(
    config=SgdConfig,
    kernels="shardkeep.ps.shard.table.optimizers.sgd_kernels",
    num_slots=lambda dim: 0,
    scalars=_scalars,
)
