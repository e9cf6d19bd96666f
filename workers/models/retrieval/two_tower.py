"""Two towers: the vector of a user by one network, that of an item by another."""

# B = samples, C = candidates, I = dense columns, E = width of a vector

from __future__ import annotations

import torch
from torch import nn

from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.models.retrieval.vectors import VectorModel


class TwoTower(VectorModel):
    """Two hidden-layer networks whose outputs are compared (Yi et al., RecSys 2019).

    Args:
        user: Dense columns and inputs of users to (B, E). It knows no column of an item.
        item: Those of items to (C, E).
    """

    def __init__(self, *, user: nn.Module, item: nn.Module, cosine: bool, temperature: float) -> None:
        super().__init__(cosine=cosine, temperature=temperature)
        self.user, self.item = user, item

    def users(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """(B, E)."""
        users_BE: torch.Tensor = self.user(dense_BI, inputs)
        return users_BE

    def items(self, dense_CI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """(C, E)."""
        items_CE: torch.Tensor = self.item(dense_CI, inputs)
        return items_CE
