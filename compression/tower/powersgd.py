"""PowerSGD (Vogels et al., 2019): each matrix of the tower's gradient as a product of two thin ones.

Not torch's own hook: that one averages, adds in the order of gloo's ring, keys its state by bucket, and changes it
before a step is known to count. Here P and Q are added in rank order, and all of it waits for `settle`.
"""

# n, m = rows and columns of a gradient, r = rank of its approximation

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Sum
from shardkeep.compression.tower.formats import FP32, VALUES, DenseFormat, sum_in_rank_order, worth_sharding
from shardkeep.compression.tower.forms import Shape
from shardkeep.compression.tower.residuals import Residuals

ONE_ROUND_BYTES = 1 << 11
"""As in `formats`, but lower: users of this form have links where bytes cost more than rounds."""
LEAST_GAIN = 2
"""A gradient is approximated if that takes so many times fewer values; others are sent as they are."""


class PowerSGD(DenseForm):
    """`M ~ P Q^T`: P = M Q made orthonormal, then Q = M^T P, both summed over ranks; what is left is sent later.

    Q of the last step is the next one's first guess (warm start). It is the same on all ranks.

    Args:
        shapes: of all parameters, by name.
        fmt: of P, Q and the gradients that are not approximated.
    """

    has_residual = True

    def __init__(self, rank: int, fmt: DenseFormat, shapes: Mapping[str, Shape], residuals: Residuals) -> None:
        self._rank = rank
        self._fmt = fmt
        self._residuals = residuals
        self._q_mr = {
            name: self._first_guess(name, shape).to(residuals.device)
            for name, shape in shapes.items()
            if self.thins(shape)
        }
        self._next: dict[str, torch.Tensor] = {}

        self._num_first = sum(
            rank * _matrix(shape)[0] if self.thins(shape) else torch.Size(shape).numel() for shape in shapes.values()
        )
        self._num_second = sum(q.numel() for q in self._q_mr.values())

    def thins(self, shape: Shape) -> bool:
        """Whether a gradient of this shape is approximated."""
        if len(shape) < 2 or 0 in shape:
            return False
        n, m = _matrix(shape)
        return LEAST_GAIN * self._rank * (n + m) < n * m

    def _first_guess(self, name: str, shape: Shape) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return _orthonormal(torch.randn(_matrix(shape)[1], self._rank, generator=drawn))

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        flat = [torch.empty(grad.numel(), device=grad.device) for grad in grads]
        thin = [i for i, name in enumerate(names) if name in self._q_mr]
        rest = [i for i, name in enumerate(names) if name not in self._q_mr]
        waits = self._residuals.add(names, grads, flat)
        matrices = [flat[i].view(_matrix(tuple(grads[i].shape))) for i in thin]
        first = [m_nm @ self._q_mr[names[i]] for m_nm, i in zip(matrices, thin, strict=True)]
        summed, lost = yield from self._summed([*first, *(flat[i] for i in rest)], ranks, self._num_first)
        totals = {i: total.view(-1) for i, total in zip(rest, summed[len(thin) :], strict=True)}
        if not torch.isfinite(torch.cat([part.reshape(-1) for part in summed])).all():  # equal on all ranks
            return torch.full_like(torch.cat(flat), torch.nan)
        left = {i: part.view(-1) for i, part in zip(rest, lost[len(thin) :], strict=True)}
        if thin:
            p_nr = [_orthonormal(part) for part in summed[: len(thin)]]
            own_q = [m_nm.T @ p for m_nm, p in zip(matrices, p_nr, strict=True)]
            q_mr, lost = yield from self._summed(own_q, ranks, self._num_second)
            for i, m_nm, p, q, my_q, rest_q in zip(thin, matrices, p_nr, q_mr, own_q, lost, strict=True):
                totals[i] = _product(p, q).view(-1)
                # Of this rank's own part of the product, so that over ranks it is what the whole product lacks.
                left[i] = m_nm.sub_(_product(p, my_q.sub_(rest_q))).view(-1)  # no BLAS: TF32 would lose what it rounds
                if q.any():  # no rank had a gradient: from a guess of zeros it would never come back
                    self._next[names[i]] = _orthonormal(q)
        order = range(len(names))
        self._residuals.keep(names, [left[i] for i in order], waits)
        return torch.cat([totals[i] for i in order])

    def _summed(
        self, parts: Sequence[torch.Tensor], ranks: Ranks, num_values: int
    ) -> Generator[Exchange, torch.Tensor, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The parts' sums over ranks, and the residual of this rank's parts.

        Args:
            num_values: of such parts of all parameters, however many are summed together.
        """
        flat, rests = [part.reshape(-1) for part in parts], list[torch.Tensor]()
        shards = worth_sharding(num_values, ranks, ONE_ROUND_BYTES)
        totals = yield from sum_in_rank_order(flat, self._fmt, ranks, shards=shards, rests=rests)
        return (
            [total.view(part.shape) for total, part in zip(totals, parts, strict=True)],
            [rest.view(part.shape) for rest, part in zip(rests, parts, strict=True)],
        )

    def settle(self, applied: bool) -> None:
        """The step counts, or it never was."""
        if applied:
            self._q_mr |= self._next
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        """The guesses, by the parameter's name; live tensors, the same on all ranks."""
        return {"guesses": dict(self._q_mr)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a copy. Raises ValueError for guesses of other shapes."""
        self._next, guesses = {}, state.get("guesses", {})
        for name, q in self._q_mr.items():
            guess = guesses.get(name)
            if guess is None or guess.shape != q.shape:
                raise ValueError(
                    f"guess of {name}: {None if guess is None else tuple(guess.shape)}, not {tuple(q.shape)}"
                )
            self._q_mr[name] = guess.to(q.device, copy=True)


def powersgd(config: TowerCompressionConfig, shapes: Mapping[str, Shape], residuals: Residuals) -> PowerSGD:
    return PowerSGD(config.rank or 2, VALUES[config.values] if config.values else FP32, shapes, residuals)


def _matrix(shape: Shape) -> tuple[int, int]:
    rows = shape[0]
    return rows, torch.Size(shape).numel() // rows


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns of the same span, in memory of their own: results of BLAS depend on alignment."""
    columns: torch.Tensor = torch.linalg.qr(matrix.clone()).Q.contiguous()
    return columns


def _product(p_nr: torch.Tensor, q_mr: torch.Tensor) -> torch.Tensor:
    """P Q^T, the same on all ranks. By element, product and sum apart: BLAS, or a fused multiply-add, may round
    otherwise on a GPU, or on another machine."""
    (p_n1, *more_p), (q_m, *more_q) = torch.split(p_nr, 1, dim=1), q_mr.T.contiguous().unbind()
    out_nm: torch.Tensor = p_n1 * q_m
    term_nm = torch.empty_like(out_nm)
    for p_n1, q_m in zip(more_p, more_q, strict=True):
        out_nm += torch.mul(p_n1, q_m, out=term_nm)
    return out_nm
