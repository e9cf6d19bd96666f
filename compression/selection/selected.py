"""Selected rows as a row pool hands them out, and what its kernels fill on the way there. Data only."""
# T = tables of the group, V = a step's rows, E = rows besides those of the step, K = sent rows, D = embedding dim

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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
    scores_K: Floats
    slots_K: Ints
    """Where the residuals lay when the rows were selected, -1 = nowhere: for `commit`."""
    num_overflow: int = 0
    """Rows sent because there was no slot: of the step, or such that had to give theirs away."""
    num_bad: int = 0
    """Rows of the step left out because they are, or with their residual would be, not finite."""

    @classmethod
    def plain(cls, starts_T1: Ints, ids_K: Ints, rows_KD: Floats, slots_K: Ints, **counts: int) -> Selected:
        """Rows that have no squares."""
        nothing = np.zeros(ids_K.size, dtype=np.float32)
        return cls(starts_T1, ids_K, rows_KD, nothing, nothing, slots_K, **counts)

    @classmethod
    def empty(cls, num_starts: int, num_rows: int, dim: int, num_overflow: int, num_bad: int) -> Selected:
        """Allocates arrays that `row_pool_kernels.gather` fills."""
        starts_T1, ids_K, slots_K = (np.empty(n, dtype=np.int64) for n in (num_starts, num_rows, num_rows))
        squares_K, scores_K = np.empty((2, num_rows), dtype=np.float32)
        rows_KD = np.empty((num_rows, dim), dtype=np.float32)
        return cls(starts_T1, ids_K, rows_KD, squares_K, scores_K, slots_K, num_overflow, num_bad)


class StepRows(NamedTuple):
    """What `kernels.select` finds out about the rows of a step, in the order of its arguments."""

    slots_V: Ints
    scores_V: Floats
    squares_V: Floats
    fates_V: Bytes

    @classmethod
    def of(cls, num_rows: int) -> StepRows:
        scores_V, squares_V = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.float32)
        return cls(np.empty(num_rows, dtype=np.int64), scores_V, squares_V, np.zeros(num_rows, dtype=np.uint8))


class ExtraRows(NamedTuple):
    """Room for rows that are sent besides those of the step, in the order of the kernels' arguments."""

    heads: Ints
    stats: Floats
    rows: Floats

    @classmethod
    def of(cls, room: int, dim: int) -> ExtraRows:
        heads = np.empty((room, EXTRA), dtype=np.int64)
        return cls(heads, np.empty((room, 2), dtype=np.float32), np.empty((room, dim), dtype=np.float32))
