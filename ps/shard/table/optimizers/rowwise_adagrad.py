"""Row-wise Adagrad as the registry knows it; its kernel is in rowwise_adagrad_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import RowwiseAdagradConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars


def _scalars(config: RowwiseAdagradConfig, step: int) -> Scalars:
    return config.lr * config.schedule.factor(step), config.weight_decay, config.eps


ENTRY = RowOptimizer(
    config=RowwiseAdagradConfig,
    kernels="shardkeep.ps.shard.table.optimizers.rowwise_adagrad_kernels",
    num_slots=lambda dim: 1,
    scalars=_scalars,
    initial_slot=lambda config: config.initial_accumulator,
)
