"""Rows: the rows with the largest norm of gradient and residual."""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.selector import Selector, Step
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.threshold_kernels import mark_largest


class Rows(Selector):
    """Sends the `num_kept(V, keep)` rows with the largest L2 norm over all tables, of equal ones the first."""

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        marks_V = np.zeros(step.ids_V.size, dtype=np.uint8)
        mark_largest(step.norms_V.view(np.int32), num_kept(marks_V.size, step.keep), marks_V)
        return marks_V.view(np.bool_)
