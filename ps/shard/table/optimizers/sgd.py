"""SGD as the registry knows it; its kernel is in sgd_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import SgdConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars


def _scalars(config: SgdConfig, step: int) -> Scalars:
    return config.lr * config.schedule.factor(step), config.weight_decay


ENTRY = RowOptimizer(
    config=SgdConfig,
    kernels="shardkeep.ps.shard.table.optimizers.sgd_kernels",
    num_slots=lambda dim: 0,
    scalars=_scalars,
)
