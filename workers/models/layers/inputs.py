"""The inputs of a model: columns and embeddings side by side, and embeddings brought to one dim."""

# B = batch, I = dense columns, F = features, D = common embedding dim

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions


class Projections(nn.Module):
    """Brings features of mixed dims to one dim, by a Linear without bias where the dim differs; stacks them.

    (After "Mixed Dimension Embeddings", arXiv:1909.11810.)
    """

    def __init__(self, features: Mapping[str, int], dim: int, options: HiddenOptions) -> None:
        super().__init__()
        self.names = tuple(features)
        # A list, not a dict by name: a column's name may hold dots, which nn.ModuleDict refuses.
        self.layers = nn.ModuleList(
            nn.Identity() if width == dim else options.linear(width, dim, bias=False) for width in features.values()
        )

    def forward(self, embeddings: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """F tensors (B, D) in the order of the features."""
        return [
            embeddings[name] if isinstance(layer, nn.Identity) else layer(embeddings[name])
            for name, layer in zip(self.names, self.layers, strict=True)
        ]


class Joined(nn.Module):
    """Dense columns and all embeddings side by side: (B, I + sum of dims)."""

    def __init__(self, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        self.names = tuple(features)
        self.out_width = num_dense + sum(features.values())

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([dense_BI, *(embeddings[name] for name in self.names)], dim=1)
