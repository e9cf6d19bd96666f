"""The kernel of Adam over rows."""
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
    """scalars: rate with bias correction, weight decay, eps, 1 - beta1, 1 - beta2. Slots: moments 1, then 2."""
    rate, decay, eps, blend1, blend2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    summed = grad_UD.shape[1] > dim
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, slots = weights_of(row, dim), slots_of(row, dim)
        means, squares = slots[:dim], slots[dim:]
        factor, addend = share(grad_UD[i, :dim], grad_UD[i, dim]) if summed else (ONE, ZERO)
        for d in range(dim):
            g = grad_UD[i, d] + decay * weights[d]
            root = factor * grad_UD[i, d] + decay * weights[d]
            mean = means[d] + (g - means[d]) * blend1
            square = squares[d] + (root * root + addend - squares[d]) * blend2
            means[d], squares[d] = mean, square
            divisor = np.sqrt(square) + eps
            weights[d] -= rate * (mean / divisor) if divisor > ZERO else ZERO
