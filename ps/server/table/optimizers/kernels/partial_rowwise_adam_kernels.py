"""The kernel of partial row-wise Adam over rows."""
# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import RecordBlocks
from shardkeep.ps.server.table.layout_kernels import prefetch_record, record, slots_of, weights_of
from shardkeep.ps.server.table.optimizers.kernels.shared_kernels import SIGNATURE, ZERO


@kernel(SIGNATURE)
def update(blocks: RecordBlocks, dim: int, slots_U: Ints, grad_UD: Rows, scalars: Rows) -> None:
    """scalars: rate and eps, both with bias correction, then as in Adam. Slots: moment 1 of each value, then moment 2
    of the row.

    The mean square is written out as in row-wise Adagrad: a call costs 10 ns a row."""
    rate, decay, eps, blend1, blend2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    summed = grad_UD.shape[1] > dim
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, means = weights_of(row, dim), slots_of(row, dim)
        a = b = c = e = ZERO  # four chains of additions hide the latency of one
        whole = dim & ~3
        for d in range(0, whole, 4):
            g0 = grad_UD[i, d] + decay * weights[d]
            g1 = grad_UD[i, d + 1] + decay * weights[d + 1]
            g2 = grad_UD[i, d + 2] + decay * weights[d + 2]
            g3 = grad_UD[i, d + 3] + decay * weights[d + 3]
            a, b, c, e = a + g0 * g0, b + g1 * g1, c + g2 * g2, e + g3 * g3
        for d in range(whole, dim):
            g0 = grad_UD[i, d] + decay * weights[d]
            a += g0 * g0
        square = grad_UD[i, dim] if summed else ((a + c) + (b + e)) / np.float32(dim)
        moment = means[dim] + (square - means[dim]) * blend2
        means[dim] = moment
        divisor = np.sqrt(moment) + eps
        factor = rate / divisor if divisor > ZERO else ZERO
        for d in range(dim):
            g = grad_UD[i, d] + decay * weights[d]
            mean = means[d] + (g - means[d]) * blend1
            means[d] = mean
            weights[d] -= factor * mean
