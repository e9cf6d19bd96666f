"""FTRL as the registry knows it; its kernel is in ftrl_kernels.py."""

from __future__ import annotations

from shardkeep.ps.config import FtrlConfig
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer, Scalars, Update


def _scalars(config: FtrlConfig, update: Update) -> Scalars:
    factor = update.lr_factor * config.schedule.factor(update.step)
    return 1.0 / config.lr, config.beta, config.l1, config.l2, factor


ENTRY = RowOptimizer(
    config=FtrlConfig,
    kernels="shardkeep.ps.shard.table.optimizers.ftrl_kernels",
    num_slots=lambda dim: 2 * dim,
    scalars=_scalars,
)
