"""What the kernels of all row optimizers share: one pass per row over [D weights | S slots] of its record.

The formulas are those of the optimizers' settings. Every value is float32; what depends on the step only is computed in
float64 by the caller and handed over in `scalars`. A zero divisor (eps 0, no gradient yet) means no change.

Behind the D values of its gradient a row may have its mean squared gradient, where the gradient is a sum of several
steps' and its own square would be something else; its elements share it like their own squares. SGD and LARS ignore it.
"""
# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np
from numba.core.types import int64, void

from shardkeep.base.arrays import Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import BLOCKS, FLOATS, INTS, ROWS

SIGNATURE = void(BLOCKS, int64, INTS, ROWS, FLOATS)
"""Of an optimizer's kernel: blocks, dim, slots_U, grad_UD (D or D + 1 columns), scalars."""
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
_LARGEST = np.float32(3.4028235e38)


@kernel("UniTuple(float32, 2)(float32[::1], float32)")
def share(grad_D: Rows, square: np.float32) -> tuple[np.float32, np.float32]:
    """(factor, addend): an element's part of the row's mean square is (factor * its gradient)² + addend. In equal parts
    where the gradient has vanished beside what it is the sum of."""
    total = ZERO
    for d in range(grad_D.size):
        total += grad_D[d] * grad_D[d]
    ratio = square * np.float32(grad_D.size) / total
    if total > ZERO and ratio < _LARGEST:
        return np.sqrt(ratio), ZERO
    return ZERO, square
