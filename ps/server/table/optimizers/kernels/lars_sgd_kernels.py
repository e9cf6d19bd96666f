"""The kernel of LARS over rows."""
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
    """scalars: rate times eta, weight decay, momentum. Slots: the momentum, with the rates of its steps in it."""
    rate, decay, momentum = scalars[0], scalars[1], scalars[2]
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, moved = weights_of(row, dim), slots_of(row, dim)
        weight_square = grad_square = ZERO
        for d in range(dim):
            weight_square += weights[d] * weights[d]
            grad_square += grad_UD[i, d] * grad_UD[i, d]
        weight_norm = np.sqrt(weight_square)
        divisor = np.sqrt(grad_square) + decay * weight_norm
        local = rate * weight_norm / divisor if divisor > ZERO else ZERO
        for d in range(dim):
            step = momentum * moved[d] + local * (grad_UD[i, d] + decay * weights[d])
            moved[d] = step
            weights[d] -= step
