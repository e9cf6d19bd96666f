"""Row selection: which of a step's rows are worth sending. Works on row norms; knows no values' format.

Rows are taken whole and as they are, so signs and values are the caller's own (`grad_UD[positions]`).
"""
# U = unique ids, D = embedding dim, K = kept rows

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shardkeep.compression.codec import Rows


def select_rows(grad_UD: Rows, keep: float) -> npt.NDArray[np.int64]:
    """Positions of the `keep` share of the rows with the largest L2 norm, int64 (K,), ascending.

    K = max(1, ceil(U * keep)), 0 where there are no rows. Of rows with equal norms the first are taken, so
    the choice is a function of the values alone. A row that is not finite counts as the largest. O(U * D).

    Raises ValueError for a `keep` outside (0, 1].
    """
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"keep: {keep}; allowed: above 0, up to 1")
    num_rows = len(grad_UD)
    if keep == 1.0 or num_rows <= 1:
        return np.arange(num_rows)
    return _largest(_squared_norms(grad_UD), num_kept(num_rows, keep))


def num_kept(num_rows: int, keep: float) -> int:
    """K of `select_rows`. Rounded to 1e-9 first: 100 * 0.07 is a little above 7 in floating point."""
    return min(num_rows, max(1, math.ceil(round(num_rows * keep, 9))))


def _squared_norms(grad_UD: Rows) -> npt.NDArray[np.float64]:
    """In float64: the square of a float32 above 1.8e19 would be infinite, below 1e-23 zero."""
    squares: npt.NDArray[np.float64] = np.einsum("ud,ud->u", grad_UD, grad_UD, dtype=np.float64)
    np.nan_to_num(squares, copy=False, nan=np.inf, posinf=np.inf)
    return squares


def _largest(scores_U: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Positions of the `count` largest scores, ascending; of equal ones the first."""
    threshold = np.partition(scores_U, scores_U.size - count)[scores_U.size - count]
    chosen_U = scores_U > threshold
    ties = np.flatnonzero(scores_U == threshold)
    chosen_U[ties[: count - np.count_nonzero(chosen_U)]] = True
    return np.flatnonzero(chosen_U)
