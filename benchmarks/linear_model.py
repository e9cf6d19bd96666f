"""Logistic regression as a shardkeep model: the baseline that quality.py compares with. Its tables have dim 1."""

# B = batch, I = dense columns

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class Linear(nn.Module):
    """The logit is a weight per category, a weight per dense column, and a bias."""

    def __init__(self, *, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        if any(dim != 1 for dim in features.values()):
            raise ValueError("a linear model needs tables of dim 1")
        self.weight_I = nn.Parameter(torch.zeros(num_dense))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and embeddings (B, 1)."""
        categories_B1 = torch.stack(list(embeddings.values())).sum(0)
        return categories_B1 + (dense_BI @ self.weight_I)[:, None] + self.bias
