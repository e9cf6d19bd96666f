"""Layers the models share: multilayer perceptrons and projections to one width."""

# B = batch, I = inputs, O = outputs, F = features, D = common embedding dim

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """A Linear with the start values of the DLRM reference (arXiv:1906.00091): N(0, 2 / (I + O)), bias N(0, 1 / O)."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)))
        if bias:
            layer.bias.normal_(0.0, math.sqrt(1.0 / outputs))
    return layer


class Mlp(nn.Module):
    """Linear, ReLU, dropout for each width. `out_width` is the width of the result.

    Args:
        checkpointing: keep only the inputs of each hidden layer for the backward pass and compute the rest again.
    """

    def __init__(self, inputs: int, widths: Sequence[int], *, dropout: float, checkpointing: bool) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in widths:
            block = [linear(inputs, width), nn.ReLU(inplace=True)]  # in place: 1 % of the tower
            blocks.append(nn.Sequential(*block, nn.Dropout(dropout)) if dropout else nn.Sequential(*block))
            inputs = width
        self.blocks = nn.ModuleList(blocks)
        self.out_width = inputs
        self.checkpointing = checkpointing

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        recomputed = self.checkpointing and self.training
        for block in self.blocks:
            x_BI = checkpoint(block, x_BI, use_reentrant=False) if recomputed else block(x_BI)
        return x_BI


class Projections(nn.Module):
    """Brings features of mixed dims to one dim, by a Linear without bias where the dim differs; stacks them.

    (After "Mixed Dimension Embeddings", arXiv:1909.11810.)
    """

    def __init__(self, features: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self.names = tuple(features)
        # A list, not a dict by name: a column's name may hold dots, which nn.ModuleDict refuses.
        self.layers = nn.ModuleList(
            nn.Identity() if width == dim else linear(width, dim, bias=False) for width in features.values()
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
