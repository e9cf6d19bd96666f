"""RowOptimizer: what all row optimizers have. Loads neither torch nor numba."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pydantic import model_validator

from shardkeep.base.settings import Settings

Scalars = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What one update of rows depends on, besides the rows, their gradients and the settings."""

    step: int
    """Step of the job."""
    lr_factor: float = 1.0
    """Multiplies the learning rate, as a schedule does."""
    decay_share: float = 1.0
    """Multiplies the weight decay: the part of a step's ranks whose gradients the update has."""
    earlier_steps: int = 0
    """Steps of the jobs before, whose optimizer state the rows continue; Adam's bias correction counts them."""

    @property
    def t(self) -> int:
        """The step as bias correction counts it, from 1."""
        return self.earlier_steps + self.step + 1


class OptimizerSettings(Settings):
    """The settings of one kind of optimizer, and how it changes rows."""

    exact_state: ClassVar[str] = ""
    """Why its slots are not stored as bf16; empty = they may be."""
    keeps_zeros: ClassVar[bool] = False
    """Whether a row of zeros stays zero."""

    @property
    def initial_slot(self) -> float:
        """Value of every slot of a new row."""
        return 0.0

    @abstractmethod
    def num_slots(self, dim: int) -> int:
        """Slots of a row of `dim` values."""

    @abstractmethod
    def scalars(self, update: RowUpdate) -> Scalars:
        """The kernel's scalar arguments for an update."""

    @property
    def decays_all_rows(self) -> bool:
        """Whether each update decays all rows of the table."""
        return getattr(self, "weight_decay_on", "touched") == "table"

    @model_validator(mode="after")
    def _decays_something(self) -> OptimizerSettings:
        if self.decays_all_rows and not getattr(self, "weight_decay", 0.0):
            raise ValueError("weight_decay_on: table with weight_decay: 0; allowed: touched, or weight_decay above 0")
        return self
