"""PowerSGD whose rank follows the gradient: a matrix gets a higher rank while its product misses too much.

Each step sends a matrix M (n, m) as P (n, r) and Q (m, r), as PowerSGD does (Vogels et al., 2019). Then the ranks
exchange how much of the norm of M the product misses. Above `miss`, r grows by one in the next step; below half of it,
r shrinks by one. All ranks must choose the same r, because it is the size of the next packets: each computes it from
the same bytes. The memory keeps r as the width of the shared guess of Q, so a recovery brings it back.

    compression:
      tower: {name: "shardkeep.examples.compression.powersgd_adaptive:AdaptivePowerSGD", options: {miss: 0.5}}
"""

# n, m = rows and columns of a gradient, r = rank of its approximation, W = ranks

import math

import numpy as np
import torch

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.compression.tower.formats import FP16, sum_in_rank_order
from shardkeep.compression.tower.powersgd import guess_of, orthonormal, product, thins


class AdaptivePowerSGD:
    """`miss`: share of the norm that a product may miss. `max_rank`: the highest rank of a matrix."""

    def __init__(self, shapes, memory, miss=0.5, max_rank=8):
        self.shapes, self.memory, self.miss = shapes, memory, miss
        ranks = {name: [r for r in range(1, max_rank + 1) if thins(shape, r)] for name, shape in shapes.items()}
        self.max_rank = {name: max(found) for name, found in ranks.items() if found}  # the others are sent whole

    def sum(self, names, grads, ranks):
        added = dict(zip(names, self.memory.add(names, grads), strict=True))  # with residuals, flat
        matrices = {name: added.pop(name).view(self.shapes[name][0], -1) for name in names if name in self.max_rank}

        # P = M Q, and the parameters that are sent whole
        guesses = {name: guess_of(name, m_nm.shape[1], 1, self.memory) for name, m_nm in matrices.items()}
        first, left = {name: m_nm @ guesses[name] for name, m_nm in matrices.items()} | added, {}
        totals = yield from sum_in_rank_order(first, FP16, ranks, rests=left)
        if not all(bool(torch.isfinite(part).all()) for part in totals.values()):  # on all ranks
            return torch.full((sum(grad.numel() for grad in grads),), math.nan, device=self.memory.device)

        # Q = M^T P, and what this rank's part of the product misses
        if matrices:
            p_nr = {name: orthonormal(totals[name]) for name in matrices}
            own_q, lost = {name: m_nm.T @ p_nr[name] for name, m_nm in matrices.items()}, {}
            q_mr = yield from sum_in_rank_order(own_q, FP16, ranks, rests=lost)
            norms = []
            for name, m_nm in matrices.items():
                totals[name] = product(p_nr[name], q_mr[name])
                left[name] = m_nm - product(p_nr[name], own_q[name] - lost[name])
                norms += [float(left[name].square().sum()), float(m_nm.square().sum())]
            yield from self.choose_ranks(norms, q_mr)
        self.memory.keep(names, [left[name] for name in names])
        return torch.cat([totals[name].view(-1) for name in names])

    def choose_ranks(self, norms, q_mr):
        """Sets the next guess of each Q, with one column more or less where the rank changes.

        Args:
            norms: of each matrix on this rank, the squares of what its product misses and of itself.
        """
        packet = torch.from_numpy(np.array(norms).view(np.uint8)).to(self.memory.device)
        packets_WR = yield Exchange(packet, {"framing": packet.numel()})
        by_rank = packets_WR.cpu().numpy().view(np.float64).tolist()
        for i, (name, q) in enumerate(q_mr.items()):
            missed, whole = (sum(one[2 * i + k] for one in by_rank) for k in range(2))
            if not 0.0 <= missed <= whole < math.inf or not q.any():
                continue  # no gradient anywhere, or a packet that makes no sense: the guess stays
            share, (m, r) = math.sqrt(missed / whole), q.shape
            if share > self.miss and r < self.max_rank[name]:
                drawn = torch.Generator().manual_seed(r)
                q = torch.cat([orthonormal(q), torch.randn(m, 1, generator=drawn).to(q.device)], 1)
            elif share < self.miss / 2 and r > 1:
                q = q[:, :-1]  # the columns come in the order of their norms, about
            self.memory.share(name, orthonormal(q))
