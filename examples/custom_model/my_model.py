"""A model of your own for a job: an ordinary module that sees dense columns and one pooled row per feature."""

from collections.abc import Mapping

import torch
from torch import nn


class GatedSum(nn.Module):
    """Every feature's row is weighted by a gate that the dense columns open.

    A job calls it with `num_dense`, the number of dense columns, `features`, the width of each feature's row, and the
    keys of `model.options`.
    """

    def __init__(self, *, num_dense: int, features: Mapping[str, int], width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(num_dense, len(features))
        self.project = nn.ModuleDict({name: nn.Linear(dim, width) for name, dim in features.items()})
        self.head = nn.Sequential(nn.Linear(width + num_dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) from dense columns (B, I) and a row (B, D) per feature."""
        gates_BF = torch.sigmoid(self.gate(dense_BI))
        rows_BFW = torch.stack([layer(embeddings[name]) for name, layer in self.project.items()], dim=1)
        mixed_BW = (gates_BF.unsqueeze(2) * rows_BFW).sum(dim=1)
        logits: torch.Tensor = self.head(torch.cat([mixed_BW, dense_BI], dim=1))
        return logits
