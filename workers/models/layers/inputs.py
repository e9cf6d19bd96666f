"""The inputs of a model: columns and embeddings side by side, embeddings brought to one dim, and every feature and
column as a field, a vector of that dim, with their pairwise products."""

# B = batch, I = dense columns, F = features or fields, D = common dim

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardkeep.workers.models.layers.axes import ByInput, laid_out, named
from shardkeep.workers.models.layers.hidden import HiddenOptions

_DEVIATION = 0.01
"""Of the initial values of the vectors and weights of dense columns."""


class Projections(nn.Module):
    """Brings features of mixed dims to one dim, by a Linear without bias where the dim differs; stacks them.

    (After "Mixed Dimension Embeddings", arXiv:1909.11810.)
    """

    def __init__(self, features: Mapping[str, int], dim: int, options: HiddenOptions) -> None:
        super().__init__()
        self.names = tuple(features)
        self.layers = ByInput(
            {
                name: nn.Identity() if width == dim else options.linear(width, dim, bias=False)
                for name, width in features.items()
            }
        )

    def forward(self, embeddings: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """F tensors (B, D) in the order of the features."""
        return [
            embeddings[name] if isinstance(layer, nn.Identity) else layer(embeddings[name])
            for name, layer in zip(self.names, self.layers, strict=True)
        ]


class Concat(nn.Module):
    """Dense columns and all embeddings side by side: (B, I + sum of dims)."""

    def __init__(self, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        self.names = tuple(features)
        self.out_width = num_dense + sum(features.values())

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([dense_BI, *(embeddings[name] for name in self.names)], dim=1)


class Fields(nn.Module):
    """The vectors of all features, then those of all dense columns.

    An embedding of another dim is projected to `dim`. A dense column's vector is its value times a learned vector.
    `weighted`: a layer with weights follows, so that a new column's vector need not be 0.
    """

    ends_model, product = "product", staticmethod(torch.matmul)

    def __init__(
        self, num_dense: int, features: Mapping[str, int], dim: int, options: HiddenOptions, *, weighted: bool = True
    ) -> None:
        super().__init__()
        self.projections = Projections(features, dim, options)
        self.dense_vectors_ID: nn.Parameter | None = None
        if num_dense:
            self.dense_vectors_ID = laid_out(
                nn.Parameter(torch.randn(num_dense, dim) * _DEVIATION), num_dense, dim, inputs=None if weighted else 0
            )
        self.num_fields = vectors_of(features, num_dense) + num_dense

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """The vectors, (B, F, D)."""
        parts = [vector_BD.unsqueeze(1) for vector_BD in self.projections(embeddings)]
        if self.dense_vectors_ID is not None:
            parts.append(dense_BI.unsqueeze(2) * self.dense_vectors_ID)
        return torch.cat(parts, dim=1)

    def pairwise(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum over pairs of fields of <v_i, v_j>, (B, 1), as ((sum v)^2 - sum v^2) / 2 (Rendle, ICDM 2010)."""
        vectors = [vector_BD.to(dense_BI.dtype) for vector_BD in self.projections(embeddings)]
        if self.dense_vectors_ID is not None:
            # The dense fields enter both sums as matrix products; their (B, I, D) vectors are never built.
            sums = [self.product(dense_BI, self.dense_vectors_ID), *vectors]
            squared_BD = self.product(dense_BI.square(), self.dense_vectors_ID.square())
            squares = [squared_BD, *(v.square() for v in vectors)]
        else:
            sums, squares = vectors, [v.square() for v in vectors]
        total_BD = torch.stack(sums).sum(0)
        return 0.5 * (total_BD.square() - torch.stack(squares).sum(0)).sum(1, keepdim=True)


def vectors_of(features: Mapping[str, int], num_dense: int) -> int:
    """How many features there are; an axis where the number of dense columns is one."""
    return named(len(features), num_dense, lambda _: [(name,) for name in features])


class FirstOrder(nn.Module):
    """Sum of each feature's weight and of the weighted dense columns: sum of w_i x_i.

    A feature's weight is the last column of its row, so that an id travels once. It is pooled as the row is.

    Attributes:
        dims: Feature -> dim of its vector, one less than its row's.
    """

    ends_model, product = "product", staticmethod(torch.matmul)

    def __init__(self, num_dense: int, features: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = {name: width - 1 for name, width in features.items()}
        self.dense_weight_I1: nn.Parameter | None = None
        if num_dense:
            weight_I1 = nn.Parameter(torch.randn(num_dense, 1) * _DEVIATION)
            self.dense_weight_I1 = laid_out(weight_I1, num_dense, 1, inputs=0)

    def forward(
        self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum (B, 1), and each feature's vector (B, D) without its weight."""
        parts = {name: torch.split(embeddings[name], [dim, 1], dim=1) for name, dim in self.dims.items()}
        weights = [weight_B1 for _, weight_B1 in parts.values()]
        if self.dense_weight_I1 is not None:
            weights.append(self.product(dense_BI, self.dense_weight_I1))
        return torch.cat(weights, dim=1).sum(1, keepdim=True), {name: vector for name, (vector, _) in parts.items()}
