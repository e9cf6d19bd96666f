"""RMSprop: its settings, and what its kernel takes (kernels/rmsprop_kernels.py)."""

from __future__ import annotations

from typing import Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Decay, DecayOn, Number, Rate, Schedule, Share
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class RmspropConfig(OptimizerSettings):
    """`v += (1-alpha)(g*g-v); w -= lr * g / (sqrt(v) + eps)` per element (torch.optim.RMSprop without momentum, not
    centered), v of touched rows only."""

    name: Literal["rmsprop"] = "rmsprop"
    """RMSprop; one slot per value."""
    lr: Rate = 0.01
    alpha: Share = 0.99
    """Decay of the mean of squares."""
    eps: Number = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return dim

    def scalars(self, update: RowUpdate) -> Scalars:
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        return rate, self.weight_decay * update.decay_share, self.eps, 1.0 - self.alpha
