"""Wide & Deep: a linear model and an MLP over the same columns, added."""

# B = batch, T = labels, I = dense columns

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat, FirstOrder


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al., arXiv:1606.07792), trained jointly: logit = wide + deep. Any dims.

    The wide part is a weight for each id and dense column. Crossed columns are made in the data.
    """

    first_order_column = True

    def __init__(
        self, *, num_dense: int, features: Mapping[str, int], hidden: Sequence[int], options: HiddenOptions
    ) -> None:
        super().__init__()
        self.wide = FirstOrder(num_dense, features)
        self.joined = Concat(num_dense, self.wide.dims)
        self.deep = Mlp(self.joined.out_width, hidden, options)
        self.logit = options.output(self.deep.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled rows (B, dim of the feature + 1)."""
        wide_B1, vectors = self.wide(dense_BI, embeddings)
        logits_BT: torch.Tensor = wide_B1 + self.logit(self.deep(self.joined(dense_BI, vectors)))
        return logits_BT
