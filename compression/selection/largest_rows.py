"""The largest of many values, in O(n).

Knows no values' format and keeps nothing between calls: what is not selected is the caller's (`row_pool.py` keeps it).
"""
# N = values

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.compression.selection.threshold_kernels import mark_largest

_MAGNITUDE = np.int32(0x7FFFFFFF)


def largest(values_N: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Positions of the `count` values of largest magnitude (all, if there are fewer), int64, ascending.

    Signs play no part: the caller takes signed values by position. Of equal magnitudes the first are taken. NaN counts
    as the largest, then infinities: what is not finite is seen, never hidden. `values_N`: float32, contiguous.

    Raises TypeError for values of another form.
    """
    if values_N.dtype != np.float32 or values_N.ndim != 1 or not values_N.flags.c_contiguous:
        raise TypeError(f"values of {values_N.dtype} {values_N.shape}; allowed: contiguous float32 (N,)")
    marks_N = np.zeros(values_N.size, dtype=np.uint8)
    mark_largest(values_N.view(np.int32) & _MAGNITUDE, count, marks_N)
    return np.flatnonzero(marks_N)
