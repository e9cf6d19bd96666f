"""LAMB: its settings, and what its kernel takes (kernels/lamb_kernels.py)."""

from __future__ import annotations

import math
from typing import Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Betas, Number, Positive, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class LambConfig(OptimizerSettings):
    """Lazy Adam in steps as long as a part of the row (LAMB of You et al. 2020, FBGEMM LAMB): `u = m / (1-b1^t) /
    (sqrt(v / (1-b2^t)) + eps) + weight_decay * w; w -= lr * norm(w) / norm(u) * u`, bias correction by the job's step.

    A row of zeros stays zero, so the table needs an init other than zeros."""

    keeps_zeros = True
    name: Literal["lamb"] = "lamb"
    """Adam in steps as long as a part of the row; two slots per value."""
    lr: Positive = 0.001
    """Learning rate: the step's length over the row's."""
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    """Added to the root of the second moment, after bias correction."""
    weight_decay: Number = 0.0
    """Weight of the row in the direction of its step; not in the moments."""
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 2 * dim

    def scalars(self, update: RowUpdate) -> Scalars:
        beta1, beta2 = self.betas
        root = math.sqrt(1.0 - beta2**update.t)
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        correction = root / (1.0 - beta1**update.t)
        eps = self.eps * root  # sqrt(v) / root + eps, times root
        return rate, self.weight_decay * update.decay_share, eps, 1.0 - beta1, 1.0 - beta2, correction
