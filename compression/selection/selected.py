"""Selected rows as a residual pool hands them out. Data only."""
# T = tables of the group, K = sent rows, D = embedding dim

from __future__ import annotations

import dataclasses

from shardkeep.base.arrays import Floats, Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """Rows to send, each table's sorted by id, and what became of the others. Nobody changes the arrays."""

    starts_T1: Ints
    """Where each table's rows begin, int64 (T + 1,)."""
    ids_K: Ints
    rows_KD: Floats
    """Gradient and residual, float32 (K, D): what the value codec gets."""
    squares_K: Floats
    """Sum over the row's unsent gradients of mean_d(g^2), float32: the second-moment side channel. Beyond the range of
    float32 it is the largest number."""
    num_overflow: int = 0
    """Rows sent because there was no slot: of the step, or such that had to give theirs away."""
    num_bad: int = 0
    """Rows of the step left out because they are, or with their residual would be, not finite."""
