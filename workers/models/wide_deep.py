"""Wide & Deep: a linear model and an MLP over the same inputs, added."""

# B = batch, I = dense columns

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers import Joined, Mlp, linear


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al., arXiv:1606.07792), trained jointly: logit = wide + deep.

    The wide part is a linear layer over dense columns and embeddings: there are no extra tables of dim 1, so a
    category's own weight is a linear read-out of its row. Crossed columns are made in the data.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        top: Sequence[int],
        dropout: float,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        self.joined = Joined(num_dense, features)
        self.wide = linear(self.joined.out_width, 1, bias=False)
        self.deep = Mlp(self.joined.out_width, top, dropout=dropout, checkpointing=checkpointing)
        self.logit = linear(self.deep.out_width, 1)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        joined = self.joined(dense_BI, embeddings)
        logits_B1: torch.Tensor = self.logit(self.deep(joined)) + self.wide(joined)
        return logits_B1
