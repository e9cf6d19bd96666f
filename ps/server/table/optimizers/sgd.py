"""SGD: its settings, and what its kernel takes (kernels/sgd_kernels.py)."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Decay, DecayOn, Rate, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class SgdConfig(OptimizerSettings):
    """`w -= lr * (g + weight_decay * w)` (torch.optim.SGD without momentum)."""

    exact_state: ClassVar[str] = "keeps none"
    name: Literal["sgd"] = "sgd"
    """Plain stochastic gradient descent."""
    lr: Rate = 0.05
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 0

    def scalars(self, update: RowUpdate) -> Scalars:
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        return rate, self.weight_decay * update.decay_share
