"""A tower that waits: the model of scaling.py. It leaves the CPU idle for a stated time, as a tower on a GPU would."""

# B = batch, I = dense columns, D = embedding dim, F = features

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn


class Waiting(nn.Module):
    """One linear layer, so that every row has a gradient, and in training a wait of `wait_ms` in each forward pass."""

    def __init__(self, *, num_dense: int, features: Mapping[str, int], wait_ms: float) -> None:
        super().__init__()
        self.wait_ms = wait_ms
        self.head = nn.Linear(num_dense + sum(features.values()), 1)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, 1) of dense columns (B, I) and embeddings (B, D)."""
        logits_B1: torch.Tensor = self.head(torch.cat([dense_BI, *embeddings.values()], dim=1))
        if self.training and self.wait_ms:
            time.sleep(self.wait_ms / 1e3)
        return logits_B1
