"""Adam: its settings, and what its kernel takes (kernels/adam_kernels.py)."""

from __future__ import annotations

import math
from typing import Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Betas, Decay, DecayOn, Number, Rate, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class AdamConfig(OptimizerSettings):
    """Lazy Adam (torch.optim.SparseAdam): moments of touched rows only, bias correction by the job's step.

    `w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps)`, or with `eps_after_correction`
    `w -= lr / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)`.
    With `weight_decay_on: table` it is no longer lazy: all rows and moments change, as in torch.optim.Adam."""

    name: Literal["adam"] = "adam"
    """Lazy Adam; two slots per value."""
    lr: Rate = 0.001
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    """Added to the root of the second moment."""
    eps_after_correction: bool = False
    """false = eps is added before bias correction, as in torch.optim.SparseAdam; true = after it, as in
    torch.optim.Adam and FBGEMM."""
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 2 * dim

    def scalars(self, update: RowUpdate) -> Scalars:
        beta1, beta2 = self.betas
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        root = math.sqrt(1.0 - beta2**update.t)
        eps = self.eps * root if self.eps_after_correction else self.eps  # sqrt(v) / root + eps, times root
        rate = rate * root / (1.0 - beta1**update.t)
        return rate, self.weight_decay * update.decay_share, eps, 1.0 - beta1, 1.0 - beta2
