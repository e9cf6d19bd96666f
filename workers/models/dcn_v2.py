"""DCN-V2: explicit feature crosses, then an MLP."""

# B = batch, T = labels, I = dense columns, X = width of the joined input, R = rank

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat


class DcnV2(nn.Module):
    """Deep & Cross Network V2 (Wang et al., arXiv:2008.13535).

    The input x0 is the dense columns and the embeddings side by side, of any dims. `cross_rank` makes the
    weight of each cross layer a product of two thin matrices. stacked: the MLP is over the crosses. parallel: the MLP
    is over x0, and the logit over both outputs side by side.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        structure: str,
        cross_layers: int,
        cross_rank: int | None,
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        width = self.joined.out_width
        self.crosses = nn.ModuleList(Cross(width, cross_rank, options) for _ in range(cross_layers))
        self.top = Mlp(width, hidden, options)
        self.parallel = structure == "parallel"
        self.logit = options.output((width if self.parallel else 0) + self.top.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        start_BX = x_BX = self.joined(dense_BI, embeddings)
        for cross in self.crosses:
            x_BX = cross(start_BX, x_BX)
        deep = torch.cat([x_BX, self.top(start_BX)], dim=1) if self.parallel else self.top(x_BX)
        logits_BT: torch.Tensor = self.logit(deep)
        return logits_BT


class Cross(nn.Module):
    """x0 * (W x + b) + x, with W = U V^T of rank R where a rank is given (equations 1 and 2 of the paper)."""

    def __init__(self, width: int, rank: int | None, options: HiddenOptions) -> None:
        super().__init__()
        self.weight = (
            options.linear(width, width)
            if rank is None
            else nn.Sequential(options.linear(width, rank, bias=False), options.linear(rank, width))
        )

    def forward(self, start_BX: torch.Tensor, x_BX: torch.Tensor) -> torch.Tensor:
        crossed_BX: torch.Tensor = start_BX * self.weight(x_BX) + x_BX
        return crossed_BX
