"""PowerSGD (Vogels et al., 2019): each matrix of the tower's gradient as a product of two thin ones.

Not torch's own hook: that one averages, adds in the order of gloo's ring, keys its state by bucket, and changes it
before a step is known to count. Here P and Q are added in rank order, and all state is in the memory.
"""

# n, m = rows and columns of a gradient, r = rank of its approximation

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from shardkeep.compression.tower.exchange import DenseForm, Ranks, Shapes, Sum
from shardkeep.compression.tower.formats import FP32, VALUES, sum_in_rank_order, worth_sharding
from shardkeep.compression.tower.memory import Memory

ONE_ROUND_BYTES = 1 << 11
"""As in `formats`, but lower: users of this form have links where bytes cost more than rounds."""
MIN_GAIN = 2
"""A gradient is approximated if that takes so many times fewer values; others are sent as they are."""


class PowerSGD(DenseForm):
    """`M ~ P Q^T`: P = M Q made orthonormal, then Q = M^T P, both summed over ranks; what is left is sent later.

    Q of the last step is the next one's first guess (warm start), shared under the parameter's name.

    Args:
        values: format of P, Q and the gradients that are not approximated; None = fp32.
    """

    def __init__(self, shapes: Shapes, memory: Memory, rank: int = 2, values: str | None = None) -> None:
        self._shapes, self._rank, self._memory = shapes, rank, memory
        self._fmt = FP32 if values is None else VALUES[values]
        self._thin = {name for name, shape in shapes.items() if thins(shape, rank)}
        self._num_first = sum(rank * s[0] if name in self._thin else math.prod(s) for name, s in shapes.items())
        self._num_second = sum(rank * math.prod(shapes[name][1:]) for name in self._thin)

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        added = dict(zip(names, self._memory.add(names, grads), strict=True))
        matrices = {name: added.pop(name).view(self._shapes[name][0], -1) for name in names if name in self._thin}
        guesses = {name: guess_of(name, m_nm.shape[1], self._rank, self._memory) for name, m_nm in matrices.items()}
        first = {name: m_nm @ guesses[name] for name, m_nm in matrices.items()} | added
        left: dict[str, torch.Tensor] = {}
        shards = worth_sharding(self._num_first, ranks, ONE_ROUND_BYTES)
        totals = yield from sum_in_rank_order(first, self._fmt, ranks, shards=shards, rests=left)
        if not torch.isfinite(torch.cat([part.reshape(-1) for part in totals.values()])).all():  # equal on all ranks
            return torch.full((sum(grad.numel() for grad in grads),), math.nan, device=grads[0].device)
        if matrices:
            p_nr = {name: orthonormal(totals[name]) for name in matrices}
            own_q = {name: m_nm.T @ p_nr[name] for name, m_nm in matrices.items()}
            lost: dict[str, torch.Tensor] = {}
            shards = worth_sharding(self._num_second, ranks, ONE_ROUND_BYTES)
            q_mr = yield from sum_in_rank_order(own_q, self._fmt, ranks, shards=shards, rests=lost)
            for name, m_nm in matrices.items():
                totals[name] = product(p_nr[name], q_mr[name])
                # Of this rank's own part of the product, so that over ranks it is what the whole product lacks.
                own = product(p_nr[name], own_q[name].sub_(lost[name]))  # no BLAS: TF32 would lose what it rounds
                left[name] = m_nm.sub_(own)
                if q_mr[name].any():  # no rank had a gradient: from a guess of zeros it would never come back
                    self._memory.share(name, orthonormal(q_mr[name]))
        self._memory.keep(names, [left[name] for name in names])
        return torch.cat([totals[name].view(-1) for name in names])


def thins(shape: Sequence[int], rank: int) -> bool:
    """Whether a gradient of this shape is approximated."""
    n, size = shape[0] if len(shape) > 1 else 0, math.prod(shape)
    return size > 0 < n and MIN_GAIN * rank * (n + size // n) < size


def guess_of(name: str, columns: int, rank: int, memory: Memory) -> torch.Tensor:
    """The guess of Q: that of the last step, at first orthonormal columns (m, r) drawn by the parameter's name."""
    if name in memory.shared:
        return memory.shared[name]
    drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return orthonormal(torch.randn(columns, rank, generator=drawn)).to(memory.device)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns of the same span, in memory of their own: results of BLAS depend on alignment."""
    columns: torch.Tensor = torch.linalg.qr(matrix.clone()).Q.contiguous()
    return columns


def product(p_nr: torch.Tensor, q_mr: torch.Tensor) -> torch.Tensor:
    """P Q^T, the same on all ranks. By element, product and sum apart: BLAS, or a fused multiply-add, may round
    otherwise on a GPU, or on another machine."""
    (p_n1, *more_p), (q_m, *more_q) = torch.split(p_nr, 1, dim=1), q_mr.T.contiguous().unbind()
    out_nm: torch.Tensor = p_n1 * q_m
    term_nm = torch.empty_like(out_nm)
    for p_n1, q_m in zip(more_p, more_q, strict=True):
        out_nm += torch.mul(p_n1, q_m, out=term_nm)
    return out_nm
