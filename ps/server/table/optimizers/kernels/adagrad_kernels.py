"""The kernel of Adagrad over rows."""
# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import RecordBlocks
from shardkeep.ps.server.table.layout_kernels import prefetch_record, record, slots_of, weights_of
from shardkeep.ps.server.table.optimizers.kernels.shared_kernels import ONE, SIGNATURE, ZERO, share


@kernel(SIGNATURE)
def update(blocks: RecordBlocks, dim: int, slots_U: Ints, grad_UD: Rows, scalars: Rows) -> None:
    """scalars: rate, weight decay, eps. Slots: sums of squares."""
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    summed = grad_UD.shape[1] > dim
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, sums = weights_of(row, dim), slots_of(row, dim)
        factor, addend = share(grad_UD[i, :dim], grad_UD[i, dim]) if summed else (ONE, ZERO)
        for d in range(dim):
            g = grad_UD[i, d] + decay * weights[d]
            root = factor * grad_UD[i, d] + decay * weights[d]
            total = sums[d] + root * root + addend
            divisor = np.sqrt(total) + eps
            sums[d] = total
            weights[d] -= rate * g / divisor if divisor > ZERO else ZERO
