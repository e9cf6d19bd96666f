"""What the registry knows of a row optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Scalars = tuple[float, ...]


@dataclass(frozen=True)
class RowOptimizer:
    """One kind of optimizer: how it changes rows."""

    config: type
    """Its settings (ps/config.py), whose `name` is the optimizer's."""
    kernels: str
    """The module of its kernel, in which `update` is the kernel; imported by the tables that it changes."""
    num_slots: Callable[[int], int]
    """Slots of a row of `dim` values."""
    scalars: Callable[[Any, int], Scalars]
    """What the kernel takes for a step, from (config, step)."""
    initial_slot: Callable[[Any], float] = lambda _config: 0.0
    """Value of every slot of a new row."""

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)  # type: ignore[attr-defined]
