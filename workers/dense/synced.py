"""Statistics of all workers' samples together: what batch norm needs from the other ranks, and its transpose.

torch's SyncBatchNorm refuses CPUs. Sums are added in rank order, so equal jobs get equal bits.
"""

# B = batch of this rank, I = columns, W = ranks

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_gather


class SyncedRanks:
    """The ranks whose samples are normalized together. Every rank makes the same calls.

    Attributes:
        empty: This rank's batch is a stand-in: its samples do not count.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.empty = False

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors in rank order, (W, ...). Blocks."""
        return all_gather(self._collective, own.contiguous(), purpose="buffers")

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedRanks:
        return self


class SyncedLayers:
    """The layers of a model that normalize over ranks: those with a true `synced`. Sets their `ranks`.

    Attributes:
        ranks: After `join`.
    """

    ranks: SyncedRanks

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "synced", False) is True]

    def __len__(self) -> int:
        return len(self._layers)

    def join(self, collective: Collective) -> None:
        """Takes the ranks of another generation."""
        self.ranks = SyncedRanks(collective)
        for layer in self._layers:
            layer.ranks = self.ranks if collective.world_size > 1 else None


class Normalized(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) by the mean and variance of all ranks' samples."""

    @staticmethod
    def forward(ctx: Any, x_BI: torch.Tensor, ranks: SyncedRanks, eps: float) -> tuple[torch.Tensor, ...]:
        """Normalized columns, mean, unbiased variance (I,), and the number of samples, all float32.

        Ranks' means and squared deviations are put together as by Chan, Golub and LeVeque (1979)."""
        x_BI = x_BI.float()
        count = 0 if ranks.empty else len(x_BI)
        mean_I = x_BI.mean(dim=0)
        squares_I = (x_BI - mean_I).square().sum(dim=0)
        sums = torch.cat([mean_I, squares_I, mean_I.new_tensor([count])])
        mean_WI, squares_WI, count_W1 = torch.split(ranks.gather(sums), [mean_I.numel(), mean_I.numel(), 1], dim=1)
        total = count_W1.sum()
        counted_W1 = count_W1 > 0  # a stand-in may hold anything
        mean_I = torch.where(counted_W1, count_W1 * mean_WI, 0.0).sum(dim=0) / total
        around_WI = squares_WI + count_W1 * (mean_WI - mean_I).square()
        squares_I = torch.where(counted_W1, around_WI, 0.0).sum(dim=0)
        scale_I = torch.rsqrt(squares_I / total + eps)
        normalized_BI = (x_BI - mean_I) * scale_I
        ctx.save_for_backward(normalized_BI, scale_I, total)
        ctx.ranks, ctx.empty = ranks, ranks.empty
        variance_I = squares_I / (total - 1.0).clamp(min=1.0)
        ctx.mark_non_differentiable(mean_I, variance_I, total)
        return normalized_BI, mean_I, variance_I, total

    @staticmethod
    def backward(ctx: Any, grad_BI: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        normalized_BI, scale_I, total = ctx.saved_tensors
        sums = torch.stack([grad_BI.sum(dim=0), (grad_BI * normalized_BI).sum(dim=0)])
        sum_I, along_I = ctx.ranks.gather(sums).sum(dim=0)
        if ctx.empty:  # a stand-in has no part in the statistics
            return grad_BI * scale_I, None, None
        return (grad_BI - sum_I / total - normalized_BI * along_I / total) * scale_I, None, None
