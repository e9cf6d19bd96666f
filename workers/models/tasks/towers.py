"""TaskTowers: the layers that a label has for itself, behind those that labels share."""

# B = batch, T = labels, H = width of a task's input

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardkeep.workers.models.layers.hidden import HiddenOptions, Mlp


class TaskTowers(nn.Module):
    """An MLP and a linear layer for each label, each on an input of its own."""

    def __init__(self, inputs: int, hidden: Sequence[int], options: HiddenOptions) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(Mlp(inputs, hidden, options) for _ in range(options.outputs))
        self.logits = nn.ModuleList(options.output([inputs, *hidden][-1], 1) for _ in range(options.outputs))

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits (B, T) of T tensors (B, H)."""
        parts = zip(self.logits, self.hidden, inputs, strict=True)
        return torch.cat([logit(hidden(input_BH)) for logit, hidden, input_BH in parts], dim=1)
