"""Losses of steps as a device gives them: there at once, or only after a wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Loss:
    """A loss of `value`. `ready`: on a GPU it may not be."""

    value: float
    ready: bool = True

    def __float__(self) -> float:
        self.ready = True
        return self.value
