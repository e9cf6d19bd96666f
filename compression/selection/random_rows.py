"""Random selection: rows that are chosen by a key alone. Loads no kernels and keeps nothing between calls."""
# U = unique ids, D = embedding dim, K = kept rows

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints, Rows
from shardkeep.compression.selection.shares import num_kept


def random_rows(grad_UD: Rows, keep: float, key: int) -> Ints:
    """Positions of a random `keep` share of the rows (random-k), int64 (K,), ascending, none twice.

    A function of U, `keep` and `key` (a Philox stream named by 0 <= key < 2**128); the global generators are neither
    read nor moved. Raises ValueError for a `keep` outside (0, 1].
    """
    count, kept = len(grad_UD), num_kept(len(grad_UD), keep)
    if kept == count:
        return np.arange(count)
    chosen: Ints = np.random.Generator(np.random.Philox(key=key)).choice(count, kept, replace=False, shuffle=False)
    return np.sort(chosen)
