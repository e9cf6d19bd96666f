"""DLRM: bottom MLP over the dense columns, pairwise dot products, top MLP."""

# B = batch, T = labels, I = dense columns, D = dim of the vectors that interact, P = pairs of them, O = D + P

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.axes import named
from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Projections, vectors_of
from shardkeep.workers.models.layers.interaction import DotInteraction


class Dlrm(nn.Module):
    """Deep Learning Recommendation Model (Naumov et al., arXiv:1906.00091).

    The bottom MLP ends in `default_dim`; its output and the embeddings, projected to that dim where theirs is
    another, are multiplied pairwise; bottom output and products go through the top MLP to one logit. Without
    dense columns there is no bottom MLP: the sum of the embeddings replaces its output before the top MLP.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        default_dim: int,
        bottom: Sequence[int],
        hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.bottom: Mlp | None = None
        if num_dense:
            self.bottom = Mlp(num_dense, [*bottom, default_dim], options)
        self.projections = Projections(features, default_dim, options)
        first = named(1, num_dense, lambda dense: [("bottom of columns" if dense else "sum of features",)])
        self.interaction = DotInteraction((first if num_dense else 0) + vectors_of(features, num_dense))
        width = first * default_dim + self.interaction.num_pairs
        self.top = Mlp(width, hidden, options)
        self.logit = options.output(self.top.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        vectors = self.projections(embeddings)
        if self.bottom is None:
            products_BP = self.interaction.products(vectors)
            first_BD = torch.stack(vectors).sum(0)
            joined_BO = torch.cat([first_BD, products_BP.to(first_BD.dtype)], dim=1)
        else:
            joined_BO = self.interaction([self.bottom(dense_BI), *vectors])
        logits_BT: torch.Tensor = self.logit(self.top(joined_BO))
        return logits_BT
