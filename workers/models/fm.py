"""Factorization machine: a weight for each field and a dot product for each pair of fields."""

# B = batch, I = dense columns

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.layers.inputs import Fields, FirstOrder


class Fm(nn.Module):
    """Factorization machine (Rendle, ICDM 2010): logit = b + sum w_i x_i + sum over pairs <v_i, v_j> x_i x_j.

    Embeddings of another dim are projected to `default_dim`. A dense column has a learned vector of that dim.
    """

    first_order_column = True

    def __init__(self, *, num_dense: int, features: Mapping[str, int], default_dim: int) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, features)
        self.fields = Fields(num_dense, self.first_order.dims, default_dim, HiddenOptions(), weighted=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and pooled rows (B, dim of the feature + 1)."""
        first_B1, vectors = self.first_order(dense_BI, embeddings)
        logits_B1: torch.Tensor = self.bias + first_B1 + self.fields.pairwise(dense_BI, vectors)
        return logits_B1
