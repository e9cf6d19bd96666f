"""Row-wise Adagrad: its settings, and what its kernel takes (kernels/rowwise_adagrad_kernels.py)."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardkeep.ps.server.table.optimizers.fields import NO_SCHEDULE, Decay, DecayOn, Number, Rate, Schedule
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings, RowUpdate, Scalars


class RowwiseAdagradConfig(OptimizerSettings):
    """`s += mean_d(g*g); w -= lr * g / (sqrt(s) + eps)`, one `s` per row (FBGEMM EXACT_ROWWISE_ADAGRAD)."""

    exact_state: ClassVar[str] = "keeps one number a row, so that bf16 would save nothing"
    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    """Row-wise Adagrad; one slot per row."""
    lr: Rate = 0.05
    eps: Number = 1e-8
    """Added to the root of the accumulator."""
    initial_accumulator: Number = 0.0
    """Accumulator of a new row."""
    weight_decay: Decay = 0.0
    weight_decay_on: DecayOn = "touched"
    schedule: Schedule = NO_SCHEDULE

    def num_slots(self, dim: int) -> int:
        return 1

    @property
    def initial_slot(self) -> float:
        return self.initial_accumulator

    def scalars(self, update: RowUpdate) -> Scalars:
        rate = self.lr * update.lr_factor * self.schedule.factor(update.step)
        return rate, self.weight_decay * update.decay_share, self.eps
