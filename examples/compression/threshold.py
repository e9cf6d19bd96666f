"""Rows above a threshold: how many are sent follows from the gradients, not from `keep` (Aji and Heafield, EMNLP 2017).

compression:
  push:
    select: {name: "shardkeep.examples.compression.threshold:Threshold", options: {norm: 0.001}}
    pool_rows: 200000
"""
# V = rows of a step, D = embedding dim

from __future__ import annotations

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.selector import Selector, Step


class Threshold(Selector):
    """Sends the rows whose gradient and residual have an L2 norm of at least `norm`. The others wait."""

    def __init__(self, norm: float) -> None:
        if norm <= 0.0:
            raise ValueError(f"norm: {norm}; allowed: above 0")
        self.norm = norm

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        chosen_V: Bools = step.norms_V >= self.norm
        return chosen_V
