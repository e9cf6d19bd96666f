"""LARS: its settings, and what its kernel takes (kernels/lars_sgd_kernels.py)."""

from __future__ import annotations

from typing import Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Number, Positive, Rate, Schedule, Share
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class LarsSgdConfig(OptimizerSettings):
    """SGD with a rate per row by norms (LARS of You et al. 2017, FBGEMM LARS_SGD): `r = lr * eta * norm(w) / (norm(g) +
    weight_decay * norm(w)); m = momentum * m + r * (g + weight_decay * w); w -= m`.

    A row of zeros stays zero, so the table needs an init other than zeros."""

    keeps_zeros = True
    name: Literal["lars_sgd"] = "lars_sgd"
    """SGD in steps as long as a part of the row; one slot per value."""
    lr: Rate = 1.0
    eta: Positive = 0.001
    """Trust coefficient: the step's length over the row's, at lr 1 and without momentum."""
    momentum: Share = 0.9
    """Decay of earlier steps."""
    weight_decay: Number = 0.0
    """L2 penalty added to the gradient of rows, and its norm to the divisor."""
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return dim

    def scalars(self, update: RowUpdate) -> Scalars:
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        return rate * self.eta, self.weight_decay * update.decay_share, self.momentum
