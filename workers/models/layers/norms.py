"""Layers that normalize by statistics of the batch: batch norm and Dice.

In training they return the batch's statistics and change none of their own; `observe` adds these to the running
statistics. So a block that is recomputed in the backward pass is observed once.
"""

# B = batch, I = columns

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Statistics = tuple[torch.Tensor, ...]
"""Mean and unbiased variance (I,) of a batch's columns; () = nothing was measured."""


class BatchNorm(nn.Module):
    """Batch normalization (Ioffe and Szegedy, arXiv:1502.03167), as torch.nn.BatchNorm1d.

    A batch of fewer than two samples uses the running statistics and measures nothing.

    Args:
        affine: Scale and shift each column by trained parameters.
        momentum: Weight of a batch in the running statistics.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, width: int, *, affine: bool = True, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.eps = eps
        self.momentum = momentum

    def forward(self, x_BI: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
        """Normalized columns (B, I), and the statistics that normalized them, if the batch's did."""
        if not self.training or len(x_BI) < 2:
            mean_I, var_I = self.running_mean, self.running_var
            return F.batch_norm(x_BI, mean_I, var_I, self.weight, self.bias, False, 0.0, self.eps), ()
        # With a momentum of 1 the kernel leaves the batch's own statistics in these two.
        mean_I, var_I = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        return F.batch_norm(x_BI, mean_I, var_I, self.weight, self.bias, True, 1.0, self.eps), (mean_I, var_I)

    def observe(self, statistics: Statistics) -> None:
        """Adds a batch's statistics to the running ones."""
        if statistics:
            with torch.no_grad():
                self.running_mean.lerp_(statistics[0], self.momentum)
                self.running_var.lerp_(statistics[1], self.momentum)


class Dice(nn.Module):
    """p x + (1 - p) alpha x with p = sigmoid((x - E[x]) / sqrt(Var[x] + eps)) (DIN, Zhou et al., arXiv:1706.06978).

    alpha is one trained number a column, 0 at first. The running statistics have FuxiCTR's momentum, 0.01.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width, affine=False, eps=1e-8, momentum=0.01)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x_BI: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
        """Activated columns (B, I), and the statistics as `BatchNorm` gives them."""
        normalized_BI, statistics = self.norm(x_BI)
        p_BI = torch.sigmoid(normalized_BI)
        return x_BI * (p_BI + (1.0 - p_BI) * self.alpha), statistics

    def observe(self, statistics: Statistics) -> None:
        """Adds a batch's statistics to the running ones."""
        self.norm.observe(statistics)
