"""The tower that all opponents train: DLRM 13-512-256-D, dot products of 27 vectors, 512-256-1, as `dlrm`."""

# B = batch, I = dense inputs, F = features, V = F + 1 vectors, D = embedding dim

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from data import NUM_DENSE, NUM_FEATURES
from torch import nn

LR = 0.05


class Tower(nn.Module):
    """Logits (B, 1) of dense columns (B, I) and embeddings (B, F, D) (Naumov et al., arXiv:1906.00091)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        num_vectors = NUM_FEATURES + 1
        self.bottom = _mlp([NUM_DENSE, 512, 256, dim])
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("lower", row * num_vectors + column)  # on the flattened product: one index_select
        self.top = _mlp([dim + len(row), 512, 256])
        self.logit = nn.Linear(256, 1)

    def forward(self, dense_BI: torch.Tensor, emb_BFD: torch.Tensor) -> torch.Tensor:
        first_BD = self.bottom(dense_BI)
        vectors_BVD = torch.cat([first_BD.unsqueeze(1), emb_BFD], dim=1)
        products = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        return self.logit(self.top(torch.cat([first_BD, products], dim=1)))


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, fused=True)


loss = nn.functional.binary_cross_entropy_with_logits
