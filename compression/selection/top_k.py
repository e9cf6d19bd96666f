"""TopK: single values of the largest magnitude, table by table."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.selector import Selector, Step
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.threshold_kernels import mark_largest

_MAGNITUDE = np.int32(0x7FFFFFFF)


class TopK(Selector):
    """Sends `num_kept(values, keep)` values of each table, those of the largest magnitude, of equal ones the first."""

    sends: Literal["rows", "values"] = "values"

    def choose(self, step: Step, values_VD: Floats) -> Bools:
        marks_VD = np.zeros(values_VD.shape, dtype=np.uint8)
        for first, end in pairwise(step.starts_T1.tolist()):
            keys_N = values_VD[first:end].reshape(-1).view(np.int32) & _MAGNITUDE
            mark_largest(keys_N, num_kept(keys_N.size, step.keep), marks_VD[first:end].reshape(-1))
        return marks_VD.view(np.bool_)
