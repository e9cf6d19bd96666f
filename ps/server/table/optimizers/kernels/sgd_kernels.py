"""The kernel of SGD over rows."""
# U = unique ids, D = embedding dim

from __future__ import annotations

from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.ps.server.table.descriptor_kernels import RecordBlocks
from shardkeep.ps.server.table.layout_kernels import record, weights_of
from shardkeep.ps.server.table.optimizers.kernels.shared_kernels import SIGNATURE


@kernel(SIGNATURE)
def update(blocks: RecordBlocks, dim: int, slots_U: Ints, grad_UD: Rows, scalars: Rows) -> None:
    """scalars: rate, weight decay."""
    rate, decay = scalars[0], scalars[1]
    for i in range(slots_U.size):
        weights = weights_of(record(blocks, slots_U[i]), dim)
        for d in range(dim):
            weights[d] -= rate * (grad_UD[i, d] + decay * weights[d])
