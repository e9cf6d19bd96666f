"""Adagrad as the registry knows it; its kernel is in adagrad_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import AdagradConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars


def _scalars(config: AdagradConfig, step: int) -> Scalars:
    return config.lr * config.schedule.factor(step), config.weight_decay, config.eps


ENTRY = RowOptimizer(
    config=AdagradConfig,
    kernels="shardkeep.ps.shard.table.optimizers.adagrad_kernels",
    num_slots=lambda dim: dim,
    scalars=_scalars,
    initial_slot=lambda config: config.initial_accumulator,
)
