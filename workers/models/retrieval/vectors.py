"""Vectors: what retrieval models have in common, from the vectors of users and items to the loss of each sample."""

# B = samples, C = candidates, Q = queries, I = dense columns, E = width of a vector

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.retrieval.candidates import ItemInputs


class VectorModel(nn.Module, ABC):
    """A model of users and items.

    Args:
        cosine: Vectors are compared by their angle; else by their dot product.
        temperature: Divides the similarities in the loss.
    """

    def __init__(self, *, cosine: bool, temperature: float) -> None:
        super().__init__()
        self.cosine, self.temperature = cosine, temperature

    def forward(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vectors of users whose dot products with those of items are the similarities, float32 (B, E); of items
        where the inputs are `ItemInputs`."""
        if isinstance(inputs, ItemInputs):
            return self.compared(self.items(dense_BI, inputs))
        return self.compared(self.users(dense_BI, inputs))

    @abstractmethod
    def users(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vector of each sample's user, (B, E), from which the item is predicted that comes next."""

    @abstractmethod
    def items(self, dense_CI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vector of each item, (C, E)."""

    def queries(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The vectors from which training predicts, (Q, E): one a sample, or one an entry of its list."""
        return self.users(dense_BI, inputs)

    def compared(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Vectors whose dot products are the similarities, float32 (N, E)."""
        x_NE = x_NE.float()
        return F.normalize(x_NE, dim=1) if self.cosine else x_NE
