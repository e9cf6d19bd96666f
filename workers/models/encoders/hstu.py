"""HSTU: attention by SiLU in place of softmax, and a gate in place of hidden layers."""

# B = samples, N = entries of all samples, R = N or B, E = width of an entry, M = places, H = heads, Q = M or 1

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import HstuEncoderConfig
from shardkeep.workers.models.encoders.attention import Places, attended, check_heads, entry_width, mixed, scores_of
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.hidden import HiddenOptions


class HstuEncoder(nn.Module):
    """Hierarchical Sequential Transduction Units (Zhai et al., arXiv:2402.17152): the target is the newest entry, and
    its output the result. Without a target it is the output of the newest entry. An empty history gives zeros."""

    def __init__(self, shape: SequenceShape, config: HstuEncoderConfig, options: HiddenOptions) -> None:
        super().__init__()
        width = entry_width(shape)
        check_heads(width, config.heads)
        self.places = Places(shape, options)
        self.layers = nn.ModuleList(
            HstuLayer(width, config.heads, shape.max_length + 1, config.dropout, options) for _ in range(config.layers)
        )

    def forward(self, entries_NE: torch.Tensor, target_BE: torch.Tensor | None, sequence: Sequence) -> torch.Tensor:
        """(B, E)."""
        x_RE, whole = self.places(entries_NE, target_BE, sequence)
        for number, layer in enumerate(self.layers, start=1):
            x_RE = layer(x_RE, whole, newest=number == len(self.layers))
        outputs_BE: torch.Tensor = x_RE * (sequence.lengths > 0)[:, None]
        return outputs_BE


class HstuLayer(nn.Module):
    """Equations 1 to 3 of the paper: U, V, Q, K = SiLU(f1(LN(x))), x + f2(LN(SiLU(Q K' + b) V / M) * U).

    b is a number of each head and distance of two entries. An entry attends to itself and older ones. The layer norms
    have no parameters and M is the largest length, as in the authors' code.

    Args:
        places: The distances that have a number: 0 to `places` - 1.
    """

    def __init__(self, width: int, heads: int, places: int, dropout: float, options: HiddenOptions) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.queries, self.keys = options.linear(width, 2 * width), options.linear(width, 2 * width)
        self.out = options.linear(width, width)
        self.distance = nn.Parameter(torch.zeros(heads, places))
        self.dropout = Dropout(dropout)

    def forward(self, x_NE: torch.Tensor, sequence: Sequence, *, newest: bool) -> torch.Tensor:
        """The outputs of all entries, (N, E), or of the newest of each sample, (B, E)."""
        places_M = torch.arange(sequence.max_length, device=x_NE.device)
        distance_QM = (places_M[-1:] if newest else places_M)[:, None] - places_M
        bias_HQM = self.distance[:, distance_QM.clamp(min=0)]
        seen_B1QM = sequence.mask(last=True)[:, None, None] & (distance_QM >= 0)

        def attention(query_BHQX: torch.Tensor, key_BHMX: torch.Tensor, value_BHMX: torch.Tensor) -> torch.Tensor:
            share_BHQM = F.silu(scores_of(query_BHQX, key_BHMX) + bias_HQM) / sequence.max_length
            return mixed(share_BHQM.masked_fill(~seen_B1QM, 0.0), value_BHMX)

        x_RE = sequence.newest(x_NE) if newest else x_NE
        keys_NX = F.silu(self.keys(F.layer_norm(x_NE, (self.width,))))
        gate_RE, query_RE = F.silu(self.queries(F.layer_norm(x_RE, (self.width,)))).chunk(2, dim=1)
        joined_RE = attended(sequence, query_RE, keys_NX, attention, heads=self.heads, newest=newest)
        gated_RE = self.dropout(F.layer_norm(joined_RE, (self.width,)) * gate_RE)
        outputs_RE: torch.Tensor = x_RE + self.out(gated_RE)
        return outputs_RE
