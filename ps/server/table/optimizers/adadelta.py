"""Adadelta: its settings, and what its kernel takes (kernels/adadelta_kernels.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Decay, DecayOn, Rate, Schedule, Share
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class AdadeltaConfig(OptimizerSettings):
    """`v += (1-rho)(g*g-v); u = sqrt(a + eps) / sqrt(v + eps) * g; a += (1-rho)(u*u-a); w -= lr * u` per element
    (torch.optim.Adadelta), v and a of touched rows only."""

    name: Literal["adadelta"] = "adadelta"
    """Adadelta; two slots per value."""
    lr: Rate = 1.0
    rho: Share = 0.9
    """Decay of both means of squares."""
    eps: float = Field(1e-6, ge=1e-30, le=1e6)
    """Added to both means of squares, under the root; the first steps are as long as its root."""
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 2 * dim

    def scalars(self, update: RowUpdate) -> Scalars:
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        return rate, self.weight_decay * update.decay_share, self.eps, 1.0 - self.rho
