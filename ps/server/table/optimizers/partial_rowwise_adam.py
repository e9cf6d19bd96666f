"""Partial row-wise Adam: its settings, and what its kernel takes (kernels/partial_rowwise_adam_kernels.py)."""

from __future__ import annotations

import math
from typing import Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Betas, Decay, DecayOn, Number, Rate, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class PartialRowwiseAdamConfig(OptimizerSettings):
    """Lazy Adam with one second moment per row: `v += (1-b2)(mean_d(g*g)-v); w -= lr / (1-b1^t) * m /
    (sqrt(v / (1-b2^t)) + eps)` (FBGEMM PARTIAL_ROWWISE_ADAM), bias correction by the job's step."""

    name: Literal["partial_rowwise_adam"] = "partial_rowwise_adam"
    """Lazy Adam; a slot per value and one per row."""
    lr: Rate = 0.001
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    """Added to the root of the second moment, after bias correction."""
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return dim + 1

    def scalars(self, update: RowUpdate) -> Scalars:
        beta1, beta2 = self.betas
        root = math.sqrt(1.0 - beta2**update.t)
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        rate = rate * root / (1.0 - beta1**update.t)
        eps = self.eps * root  # sqrt(v) / root + eps, times root
        return rate, self.weight_decay * update.decay_share, eps, 1.0 - beta1, 1.0 - beta2
