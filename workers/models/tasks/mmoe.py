"""MMoE: experts that all labels share, mixed by a gate of each label."""

# B = batch, T = labels, I = dense columns, X = width of the joined input, E = experts, H = width of an expert

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp
from shardkeep.workers.models.layers.inputs import Concat
from shardkeep.workers.models.tasks.towers import TaskTowers


class Mmoe(nn.Module):
    """Multi-gate Mixture-of-Experts (Ma et al., KDD 2018), equations 6 and 7: y_k = h_k(f_k(x)) with
    f_k(x) = sum over i of g_k(x)_i f_i(x) and g_k(x) = softmax(W_gk x).

    An expert f_i is an MLP of `hidden` over dense columns and embeddings of any dims; h_k is one of `task_hidden` and a
    linear layer."""

    def __init__(
        self,
        *,
        num_dense: int,
        features: Mapping[str, int],
        experts: int,
        hidden: Sequence[int],
        task_hidden: Sequence[int],
        options: HiddenOptions,
    ) -> None:
        super().__init__()
        self.joined = Concat(num_dense, features)
        width = self.joined.out_width
        self.experts = nn.ModuleList(Mlp(width, hidden, options) for _ in range(experts))
        self.gates = nn.ModuleList(Gate(width, experts, options) for _ in range(options.outputs))
        self.towers = TaskTowers(hidden[-1], task_hidden, options)

    def forward(self, dense_BI: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of dense columns (B, I) and pooled embeddings (B, dim of the feature)."""
        joined_BX = self.joined(dense_BI, embeddings)
        experts_BEH = torch.stack([expert(joined_BX) for expert in self.experts], dim=1)
        logits_BT: torch.Tensor = self.towers([gate(joined_BX, experts_BEH) for gate in self.gates])
        return logits_BT


class Gate(nn.Module):
    """A mixture of experts: the sum over e of softmax(W x)_e times expert e."""

    def __init__(self, inputs: int, experts: int, options: HiddenOptions) -> None:
        super().__init__()
        self.share = options.linear(inputs, experts, bias=False)

    def forward(self, x_BX: torch.Tensor, experts_BEH: torch.Tensor) -> torch.Tensor:
        """(B, H)."""
        share_BE: torch.Tensor = self.share(x_BX).softmax(1)
        return (share_BE.unsqueeze(2) * experts_BEH).sum(1)
