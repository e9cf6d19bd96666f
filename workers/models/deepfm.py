"""DeepFM: a factorization machine and an MLP over the same embeddings, added."""

# B = batch, I = dense columns, F = fields, D = common dim

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers import Joined, Mlp, Projections, linear


class DeepFm(nn.Module):
    """DeepFM (Guo et al., arXiv:1703.04247): logit = first order + pairwise (FM) + deep.

    Embeddings are projected to `default_dim` where theirs is another; a dense column is a field whose vector
    is its value times a learned vector. First-order terms are a linear layer over dense columns and embeddings:
    there are no extra tables of dim 1, so a category's own weight is a linear read-out of its row.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        top: Sequence[int],
        dropout: float,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        self.projections = Projections(features, default_dim)
        self.joined = Joined(num_dense, features)
        self.dense_vectors_ID: nn.Parameter | None = None
        if num_dense:
            self.dense_vectors_ID = nn.Parameter(torch.randn(num_dense, default_dim) * 0.01)
        self.first_order = linear(self.joined.out_width, 1, bias=False)
        self.deep = Mlp(self.joined.out_width, top, dropout=dropout, checkpointing=checkpointing)
        self.logit = linear(self.deep.out_width, 1)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        joined = self.joined(dense_BI, embeddings)
        deep_B1 = self.logit(self.deep(joined))
        logits_B1: torch.Tensor = deep_B1 + self.first_order(joined) + self.pairwise(dense_BI, embeddings)
        return logits_B1

    def pairwise(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum over pairs of fields of <v_i, v_j> x_i x_j, as ((sum v)^2 - sum v^2) / 2 (Rendle, 2010)."""
        vectors = self.projections(embeddings)
        if self.dense_vectors_ID is not None:
            # The dense fields enter both sums as matrix products; their (B, I, D) vectors are never built.
            sums = [dense_BI @ self.dense_vectors_ID, *vectors]
            squares = [dense_BI.square() @ self.dense_vectors_ID.square(), *(v.square() for v in vectors)]
        else:
            sums, squares = vectors, [v.square() for v in vectors]
        total_BD = torch.stack(sums).sum(0)
        return 0.5 * (total_BD.square() - torch.stack(squares).sum(0)).sum(1, keepdim=True)
