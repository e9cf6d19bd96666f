"""Selected rows as a row pool hands them out, and what its kernels fill on the way there. Data only."""
# T = tables of the group, V = a step's rows, E = rows besides those of the step, K = sent rows, D = embedding dim

from __future__ import annotations

import dataclasses

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.compression.selection.row_pool_kernels import EXTRA


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
    ages_K: Ints
    """Steps since the oldest gradient in the row."""
    scores_K: Floats
    slots_K: Ints
    """Where the residuals lay when the rows were selected, -1 = nowhere: for `commit`."""
    num_overflow: int = 0
    """Rows sent because there was no slot: of the step, or such that had to give theirs away."""
    num_bad: int = 0
    """Rows of the step left out because they are, or with their residual would be, not finite."""

    @classmethod
    def empty(cls, num_starts: int, num_rows: int, dim: int, num_overflow: int, num_bad: int) -> Selected:
        """Allocates arrays that `row_pool_kernels.gather` fills."""

        def ints(size: int) -> Ints:
            return np.empty(size, dtype=np.int64)

        def floats(*shape: int) -> Floats:
            return np.empty(shape, dtype=np.float32)

        return cls(
            starts_T1=ints(num_starts),
            ids_K=ints(num_rows),
            rows_KD=floats(num_rows, dim),
            squares_K=floats(num_rows),
            ages_K=ints(num_rows),
            scores_K=floats(num_rows),
            slots_K=ints(num_rows),
            num_overflow=num_overflow,
            num_bad=num_bad,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """What `kernels.select` finds out about the rows of a step."""

    slots_V: Ints
    scores_V: Floats
    squares_V: Floats
    fates_V: Bytes

    @classmethod
    def of(cls, num_rows: int) -> StepRows:
        scores_V, squares_V = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.float32)
        return cls(np.empty(num_rows, dtype=np.int64), scores_V, squares_V, np.zeros(num_rows, dtype=np.uint8))

    @property
    def arrays(self) -> tuple[Ints, Floats, Floats, Bytes]:
        return self.slots_V, self.scores_V, self.squares_V, self.fates_V


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExtraRows:
    """Room for rows that are sent besides those of the step."""

    heads: Ints
    stats: Floats
    rows: Floats

    @classmethod
    def of(cls, room: int, dim: int) -> ExtraRows:
        heads = np.empty((room, EXTRA), dtype=np.int64)
        return cls(heads, np.empty((room, 2), dtype=np.float32), np.empty((room, dim), dtype=np.float32))

    @property
    def arrays(self) -> tuple[Ints, Floats, Floats]:
        return self.heads, self.stats, self.rows
