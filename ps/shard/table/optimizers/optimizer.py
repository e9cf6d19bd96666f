"""RowOptimizer: the entry of one optimizer in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Scalars = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What one update of rows depends on, besides the rows, their gradients and the settings."""

    step: int
    """Step of the job."""
    lr_factor: float = 1.0
    """Multiplies the learning rate, as a schedule does."""
    decay_share: float = 1.0
    """Multiplies the weight decay: the part of a step's ranks whose gradients the update has."""
    earlier_steps: int = 0
    """Steps of the jobs before, whose optimizer state the rows continue; Adam's bias correction counts them."""


@dataclass(frozen=True)
class RowOptimizer:
    """One kind of optimizer: how it changes rows."""

    config: type
    """Its settings (ps/config.py), whose `name` is the optimizer's."""
    kernels: str
    """The module of its kernel, in which `update` is the kernel; imported by the tables that it changes."""
    num_slots: Callable[[int], int]
    """Slots of a row of `dim` values."""
    scalars: Callable[[Any, Update], Scalars]
    """The kernel's scalar arguments for an update, from (config, update)."""
    initial_slot: Callable[[Any], float] = lambda _config: 0.0
    """Value of every slot of a new row."""

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)  # type: ignore[attr-defined]
