"""DeepFM: a factorization machine and an MLP over the same embeddings, added."""

# B = batch, T = labels, I = dense columns

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat, Fields, FirstOrder


class DeepFm(nn.Module):
    """DeepFM (Guo et al., arXiv:1703.04247): logit = first order + pairwise (FM) + deep.

    Embeddings of another dim are projected to `default_dim` for the pairs. A dense column has a learned vector there.
    """

    first_order_column = True

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, features)
        self.fields = Fields(num_dense, self.first_order.dims, default_dim, options, weighted=False)
        self.joined = Concat(num_dense, self.first_order.dims)
        self.deep = Mlp(self.joined.out_width, hidden, options)
        self.logit = options.output(self.deep.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled rows (B, dim of the feature + 1)."""
        first_B1, vectors = self.first_order(dense_BI, embeddings)
        deep_BT = self.logit(self.deep(self.joined(dense_BI, vectors)))
        logits_BT: torch.Tensor = deep_BT + first_B1 + self.fields.pairwise(dense_BI, vectors)
        return logits_BT
