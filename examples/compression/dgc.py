"""Deep Gradient Compression (Lin et al., ICLR 2018): momentum before the selection of single values.

    compression:
      push:
        select: {name: "shardkeep.examples.compression.dgc:Dgc", options: {momentum: 0.9}}
        keep: 0.01
        pool_rows: 200000

Servers need plain SGD: the momentum here replaces that of the optimizer. A row's state is v, the unsent sum, and behind
it u, the momentum. Rows that a step does not touch stay as they are.
"""
# V = rows of a step, D = embedding dim, W = 2 * D

from __future__ import annotations

import math

import numpy as np

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.selector import Step
from shardkeep.compression.selection.top_k import TopK


class Dgc(TopK):
    """For each row of a step: u <- momentum * u + g, v <- v + u. Sends the largest values of v.

    Args:
        momentum: From 0 up to 1.
        nesterov: u <- momentum * (u + g), v <- v + u + g.
        masking: A sent value's u becomes zero, so that it does not continue in an old direction.
        clip_norm: A step's gradient is scaled down to an L2 norm of clip_norm / sqrt(num_workers), because independent
            noise of N workers adds up in squares; 0 = no clipping.
    """

    def __init__(
        self, momentum: float = 0.9, *, nesterov: bool = False, masking: bool = True, clip_norm: float = 0.0
    ) -> None:
        if not 0.0 <= momentum < 1.0 or clip_norm < 0.0:
            raise ValueError(f"momentum: {momentum}, clip_norm: {clip_norm}; allowed: 0 up to 1, and 0 or more")
        self.momentum = np.float32(momentum)
        self.nesterov, self.masking, self.clip_norm = nesterov, masking, clip_norm

    def state_values(self, dim: int) -> int:
        return 2 * dim

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        grad_VD = self._clipped(grad_VD, step.num_workers)
        v_VD, u_VD = np.hsplit(state_VW, 2)
        if self.nesterov:
            u_VD[:] = self.momentum * (u_VD + grad_VD)
            return v_VD + u_VD + grad_VD
        u_VD[:] = self.momentum * u_VD + grad_VD
        return v_VD + u_VD

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        v_VD, u_VD = np.hsplit(state_VW, 2)
        v_VD[:] = values_VD - decoded_VD
        if self.masking:
            u_VD[sent_VD] = 0.0

    def _clipped(self, grad_VD: Floats, num_workers: int) -> Floats:
        squares_V = np.einsum("vd,vd->v", grad_VD, grad_VD, dtype=np.float64)
        norm = math.sqrt(squares_V[np.isfinite(squares_V)].sum())
        limit = self.clip_norm / math.sqrt(num_workers)
        return grad_VD * np.float32(limit / norm) if 0.0 < limit < norm else grad_VD
