"""Transformer: self-attention between the entries of a history and the target."""

# B = samples, N = entries of all samples, R = N or B, E = width of an entry, M = places, H = heads, Q = M or 1

from __future__ import annotations

import torch
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import TransformerEncoderConfig
from shardkeep.workers.models.encoders.attention import Places, attended, check_heads, entry_width, softmax_attention
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.hidden import HiddenOptions


class TransformerEncoder(nn.Module):
    """Behavior Sequence Transformer (Chen et al., arXiv:1905.06874): the target is the newest entry, and its output the
    result. Without a target it is the output of the newest entry. An empty history gives zeros."""

    def __init__(self, shape: SequenceShape, config: TransformerEncoderConfig, options: HiddenOptions) -> None:
        super().__init__()
        width = entry_width(shape)
        check_heads(width, config.heads)
        self.places = Places(shape, options)
        hidden = config.hidden or 4 * width
        self.layers = nn.ModuleList(
            TransformerLayer(width, config.heads, hidden, config.dropout, options) for _ in range(config.layers)
        )

    def forward(self, entries_NE: torch.Tensor, target_BE: torch.Tensor | None, sequence: Sequence) -> torch.Tensor:
        """(B, E)."""
        x_RE, whole = self.places(entries_NE, target_BE, sequence)
        for number, layer in enumerate(self.layers, start=1):
            x_RE = layer(x_RE, whole, newest=number == len(self.layers))
        outputs_BE: torch.Tensor = x_RE * (sequence.lengths > 0)[:, None]
        return outputs_BE


class TransformerLayer(nn.Module):
    """Equations 3 and 4 of the paper: y = LN(x + dropout(attention)), LN(y + dropout(W2 LeakyReLU(W1 y + b1) + b2)).

    Every entry attends to all entries of its sample."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, options: HiddenOptions) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.keys = options.linear(width, width), options.linear(width, 2 * width)
        self.out = options.linear(width, width)
        self.hidden = nn.Sequential(options.linear(width, hidden), nn.LeakyReLU(), options.linear(hidden, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, x_NE: torch.Tensor, sequence: Sequence, *, newest: bool) -> torch.Tensor:
        """The outputs of all entries, (N, E), or of the newest of each sample, (B, E)."""
        places_M = torch.arange(sequence.max_length, device=x_NE.device)
        seen_BM = sequence.mask(last=True) | (places_M == sequence.max_length - 1)  # a softmax needs one place

        def attention(query_BHQX: torch.Tensor, key_BHMX: torch.Tensor, value_BHMX: torch.Tensor) -> torch.Tensor:
            seen_B1QM = seen_BM[:, None, None].expand(-1, -1, query_BHQX.shape[2], -1)
            return softmax_attention(query_BHQX, key_BHMX, value_BHMX, seen_B1QM)

        x_RE = sequence.newest(x_NE) if newest else x_NE
        joined_RE = attended(sequence, self.query(x_RE), self.keys(x_NE), attention, heads=self.heads, newest=newest)
        y_RE = self.norms[0](x_RE + self.dropout(self.out(joined_RE)))
        z_RE: torch.Tensor = self.norms[1](y_RE + self.dropout(self.hidden(y_RE)))
        return z_RE
