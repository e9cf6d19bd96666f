"""The kernel of LAMB over rows."""
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
    """scalars: rate, weight decay, eps with bias correction, 1 - beta1, 1 - beta2, bias correction of the direction.
    Slots: moments 1, then 2.

    The direction is computed twice, once for its norm: gradients are not written to, and a row has no room for it."""
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    blend1, blend2, correction = scalars[3], scalars[4], scalars[5]
    summed = grad_UD.shape[1] > dim
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, slots = weights_of(row, dim), slots_of(row, dim)
        means, squares = slots[:dim], slots[dim:]
        factor, addend = share(grad_UD[i, :dim], grad_UD[i, dim]) if summed else (ONE, ZERO)
        weight_square = direction_square = ZERO
        for d in range(dim):
            root = factor * grad_UD[i, d]
            mean = means[d] + (grad_UD[i, d] - means[d]) * blend1
            square = squares[d] + (root * root + addend - squares[d]) * blend2
            means[d], squares[d] = mean, square
            divisor = np.sqrt(square) + eps
            direction = (correction * (mean / divisor) if divisor > ZERO else ZERO) + decay * weights[d]
            weight_square += weights[d] * weights[d]
            direction_square += direction * direction
        length = np.sqrt(direction_square)
        scale = rate * (np.sqrt(weight_square) / length) if length > ZERO else ZERO
        for d in range(dim):
            divisor = np.sqrt(squares[d]) + eps
            direction = (correction * (means[d] / divisor) if divisor > ZERO else ZERO) + decay * weights[d]
            weights[d] -= scale * direction
