"""The mean of a sequence's rows."""

# B = samples, N = entries of all samples, E = width of an entry, S = numbers

from __future__ import annotations

import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import MeanEncoderConfig
from shardkeep.workers.models.layers.hidden import HiddenOptions


class MeanEncoder(nn.Module):
    """The mean of the entries; zeros for an empty history."""

    def __init__(self, shape: SequenceShape, config: MeanEncoderConfig, options: HiddenOptions) -> None:
        super().__init__()

    def forward(self, entries_NE: torch.Tensor, target_BE: torch.Tensor | None, sequence: Sequence) -> torch.Tensor:
        """(B, E)."""
        return sequence.mean(entries_NE)
