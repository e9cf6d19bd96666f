"""FTRL: its settings, and what its kernel takes (kernels/ftrl_kernels.py)."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Number, Positive, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class FtrlConfig(OptimizerSettings):
    """FTRL-Proximal, Algorithm 1 of McMahan et al., KDD 2013, per element."""

    exact_state: ClassVar[str] = "computes rows from it, so that a row would be as coarse as bf16"
    name: Literal["ftrl"] = "ftrl"
    """FTRL-Proximal; two slots per value (z, n)."""
    lr: Positive = 0.05
    """alpha in the paper."""
    beta: Number = 1.0
    """beta in the paper: damps the rate of values seen for the first time."""
    l1: Number = 0.0
    """L1 strength; above 0 it makes weights exactly zero."""
    l2: Number = 0.0
    """L2 strength."""
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 2 * dim

    def scalars(self, update: RowUpdate) -> Scalars:
        factor = update.lr_factor * self.schedule.factor(update.step)
        return 1.0 / self.lr, self.beta, self.l1, self.l2, factor
