"""Logistic regression: a weight for each id and for each dense column."""

# B = batch, I = dense columns

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardkeep.workers.models.layers.inputs import FirstOrder


class Lr(nn.Module):
    """Logistic regression: logit = b + sum of w_i x_i (Richardson et al., WWW 2007). A row is its id's weight alone."""

    row_dim = 1

    def __init__(self, *, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, features)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and pooled rows (B, 1)."""
        logits_B1: torch.Tensor = self.bias + self.first_order(dense_BI, embeddings)[0]
        return logits_B1
