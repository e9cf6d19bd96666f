"""Fields: every feature and every dense column as one vector of a common dim, and their pairwise products."""

# B = batch, I = dense columns, F = fields, D = common dim

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.layers.inputs import Projections

_DEVIATION = 0.01
"""Of the initial values of the vectors and weights of dense columns."""


class Fields(nn.Module):
    """The vectors of all features, then those of all dense columns.

    An embedding of another dim is projected to `dim`. A dense column's vector is its value times a learned vector.
    """

    def __init__(self, num_dense: int, features: Mapping[str, int], dim: int, options: HiddenOptions) -> None:
        super().__init__()
        self.projections = Projections(features, dim, options)
        self.dense_vectors_ID: nn.Parameter | None = None
        if num_dense:
            self.dense_vectors_ID = nn.Parameter(torch.randn(num_dense, dim) * _DEVIATION)
        self.num_fields = len(features) + num_dense

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """The vectors, (B, F, D)."""
        parts = [vector_BD.unsqueeze(1) for vector_BD in self.projections(embeddings)]
        if self.dense_vectors_ID is not None:
            parts.append(dense_BI.unsqueeze(2) * self.dense_vectors_ID)
        return torch.cat(parts, dim=1)

    def pairwise(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum over pairs of fields of <v_i, v_j>, (B, 1), as ((sum v)^2 - sum v^2) / 2 (Rendle, ICDM 2010)."""
        vectors = self.projections(embeddings)
        if self.dense_vectors_ID is not None:
            # The dense fields enter both sums as matrix products; their (B, I, D) vectors are never built.
            sums = [dense_BI @ self.dense_vectors_ID, *vectors]
            squares = [dense_BI.square() @ self.dense_vectors_ID.square(), *(v.square() for v in vectors)]
        else:
            sums, squares = vectors, [v.square() for v in vectors]
        total_BD = torch.stack(sums).sum(0)
        return 0.5 * (total_BD.square() - torch.stack(squares).sum(0)).sum(1, keepdim=True)


class FirstOrder(nn.Module):
    """Sum of each feature's weight and of the weighted dense columns: sum of w_i x_i.

    A feature's weight is the last column of its row, so that an id travels once. It is pooled as the row is.

    Attributes:
        dims: Feature -> dim of its vector, one less than its row's.
    """

    def __init__(self, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = {name: width - 1 for name, width in features.items()}
        self.dense_weight_I1: nn.Parameter | None = None
        if num_dense:
            self.dense_weight_I1 = nn.Parameter(torch.randn(num_dense, 1) * _DEVIATION)

    def forward(
        self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum (B, 1), and each feature's vector (B, D) without its weight."""
        parts = {name: torch.split(embeddings[name], [dim, 1], dim=1) for name, dim in self.dims.items()}
        weights = [weight_B1 for _, weight_B1 in parts.values()]
        if self.dense_weight_I1 is not None:
            weights.append(dense_BI @ self.dense_weight_I1)
        return torch.cat(weights, dim=1).sum(1, keepdim=True), {name: vector for name, (vector, _) in parts.items()}
