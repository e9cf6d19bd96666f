"""DLRM: bottom MLP over the dense columns, pairwise dot products, top MLP."""

# B = batch, I = dense columns, F = vectors that interact, D = their dim, P = pairs

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers import Mlp, Projections, linear


class Dlrm(nn.Module):
    """Deep Learning Recommendation Model (Naumov et al., arXiv:1906.00091).

    The bottom MLP ends in `default_dim`; its output and the embeddings, projected to that dim where theirs is
    another, are multiplied pairwise; bottom output and products go through the top MLP to one logit. Without
    dense columns there is no bottom MLP: the sum of the embeddings stands in for its output before the top MLP.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        dropout: float,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        self.bottom: Mlp | None = None
        if num_dense:
            self.bottom = Mlp(num_dense, [*bottom, default_dim], dropout=dropout, checkpointing=checkpointing)
        self.projections = Projections(features, default_dim)
        self.interaction = DotInteraction(len(features) + (1 if num_dense else 0))
        width = default_dim + self.interaction.num_pairs
        self.top = Mlp(width, top, dropout=dropout, checkpointing=checkpointing)
        self.logit = linear(self.top.out_width, 1)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        vectors = self.projections(embeddings)
        if self.bottom is None:
            first_BD = torch.stack(vectors).sum(0)
        else:
            first_BD = self.bottom(dense_BI)
            vectors = [first_BD, *vectors]
        products_BP = self.interaction(torch.stack(vectors, dim=1))
        logits_B1: torch.Tensor = self.logit(self.top(torch.cat([first_BD, products_BP.to(first_BD.dtype)], dim=1)))
        return logits_B1


class DotInteraction(nn.Module):
    """Dot products of all pairs among F vectors: the lower triangle of Z Z^T without its diagonal."""

    lower_P: torch.Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        # One index_select on the flattened product saves 9 % of the tower against two index tensors.
        row_P, column_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("lower_P", row_P * num_vectors + column_P, persistent=False)
        self.num_pairs = len(row_P)

    def forward(self, vectors_BFD: torch.Tensor) -> torch.Tensor:
        products_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        return products_BFF.flatten(1).index_select(1, self.lower_P)
