"""The selector `largest`: the rows of a step with the largest norm.

Knows no values' format and keeps nothing between calls: what is not selected is the caller's (`row_pool.py` keeps it).
"""
# U = unique ids, D = embedding dim, K = kept rows

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints, Rows
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.threshold import largest
from shardkeep.compression.selection.threshold_kernels import row_norms


def largest_rows(grad_UD: Rows, keep: float, key: int = 0) -> Ints:
    """Positions of the `keep` share of the rows with the largest L2 norm, int64 (K,), ascending.

    K = `num_kept(U, keep)`. Of rows with equal norms (as float32) the first are taken, so the choice is a function of
    the values alone: `key` has no effect. A row that is not finite counts as the largest. O(U * D).

    Raises ValueError for a `keep` outside (0, 1].
    """
    count = num_kept(len(grad_UD), keep)
    if count == len(grad_UD):
        return np.arange(count)
    norms_U = np.empty(len(grad_UD), dtype=np.float32)
    row_norms(np.ascontiguousarray(grad_UD, dtype=np.float32), norms_U)
    return largest(norms_U, count)
