"""The kernel of FTRL over rows."""
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
    """scalars: 1 / alpha, beta, l1, l2, the factor of schedule and push. Slots: z, then n.

    The factor scales the gradient's term in z: without l1 and l2 a step is then `w -= factor * alpha * g /
    (beta + sqrt(n))`. A factor on alpha itself would shrink the weights, for z remembers the old alpha."""
    inverse, beta, l1, l2, factor = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    summed = grad_UD.shape[1] > dim
    for i in range(slots_U.size):
        prefetch_record(blocks, slots_U, i)
        row = record(blocks, slots_U[i])
        weights, slots = weights_of(row, dim), slots_of(row, dim)
        zs, ns = slots[:dim], slots[dim:]
        factor_i, addend = share(grad_UD[i, :dim], grad_UD[i, dim]) if summed else (ONE, ZERO)
        for d in range(dim):
            g = grad_UD[i, d]
            n = ns[d] + (factor_i * g) * (factor_i * g) + addend
            root = np.sqrt(n)
            z = zs[d] + factor * g - (root - np.sqrt(ns[d])) * inverse * weights[d]
            zs[d], ns[d] = z, n
            divisor = (beta + root) * inverse + l2
            excess = z - np.copysign(l1, z)
            weights[d] = -excess / divisor if abs(z) > l1 and divisor > ZERO else ZERO
