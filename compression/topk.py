"""Selection: which of a step's rows or elements are worth sending, and how many.

Positions and signed values come out as they went in. Knows no values' format and keeps nothing between calls: what is
not selected is the caller's (`row_pool.py` keeps it).
"""
# U = unique ids, D = embedding dim, N = elements, K = kept rows or elements

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.compression.codec import Rows
from shardkeep.compression.shares import num_kept
from shardkeep.compression.threshold import largest
from shardkeep.compression.threshold_kernels import row_norms

Positions = npt.NDArray[np.int64]
Elements = npt.NDArray[np.float32]


def select_rows(grad_UD: Rows, keep: float) -> Positions:
    """Positions of the `keep` share of the rows with the largest L2 norm, int64 (K,), ascending.

    K = `num_kept(U, keep)`. Of rows with equal norms (as float32) the first are taken, so the choice is a function of
    the values alone. A row that is not finite counts as the largest. O(U * D).

    Raises ValueError for a `keep` outside (0, 1].
    """
    count = num_kept(len(grad_UD), keep)
    if count == len(grad_UD):
        return np.arange(count)
    norms_U = np.empty(len(grad_UD), dtype=np.float32)
    row_norms(np.ascontiguousarray(grad_UD, dtype=np.float32), norms_U)
    return largest(norms_U, count)


def select_elements(values_N: Elements, keep: float, *, dense_below: int = 0) -> tuple[Positions, Elements]:
    """Positions, int64 (K,), ascending, and signed values, float32 (K,), of the `keep` share of elements with the
    largest magnitude; all of them where there are fewer than `dense_below`.

    Ties and values that are not finite as in `largest`. Raises ValueError for a `keep` outside (0, 1].
    """
    count = num_kept(values_N.size, keep)
    if values_N.size < dense_below:
        count = values_N.size
    positions_K = np.arange(count) if count == values_N.size else largest(values_N, count)
    return positions_K, values_N[positions_K]


def largest_rows(grad_UD: Rows, keep: float, key: int) -> Positions:
    """`select_rows` as a selector of the registry; draws nothing, so `key` has no effect."""
    return select_rows(grad_UD, keep)
