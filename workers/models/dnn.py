"""DNN: an MLP over all inputs."""

# B = batch, T = labels, I = dense columns

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat


class Dnn(nn.Module):
    """An MLP over dense columns and embeddings side by side, as in Covington et al., RecSys 2016. Any dims."""

    def __init__(
        self, *, num_dense: int, features: Mapping[str, int], hidden: Sequence[int], options: HiddenOptions
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        self.top = Mlp(self.joined.out_width, hidden, options)
        self.logit = options.output(self.top.out_width)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        logits_BT: torch.Tensor = self.logit(self.top(self.joined(dense_BI, embeddings)))
        return logits_BT
