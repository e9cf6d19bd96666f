"""SASRec: causal self-attention over the items of a list."""

# B = samples, N = entries of all samples, R = N or B, E = width of an entry, M = places, H = heads, Q = M or 1

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.embeddings.sequence import Sequence
from shardkeep.workers.models.encoders.attention import attended, check_heads, softmax_attention
from shardkeep.workers.models.layers.dropout import Dropout
from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.retrieval.next_item import ItemList, NextItem


class SasRec(NextItem):
    """Self-Attentive Sequential Recommendation (Kang and McAuley, arXiv:1808.09781)."""

    def __init__(
        self,
        *,
        entries: ItemList,
        layers: int,
        heads: int,
        hidden: int | None,
        options: HiddenOptions,
        cosine: bool,
        temperature: float,
    ) -> None:
        width, options = entries.width, replace(options, init="xavier_normal")
        check_heads(width, heads, setting="model.heads")
        blocks = [SasRecLayer(width, heads, hidden or width, options) for _ in range(layers)]
        super().__init__(entries, blocks, options, cosine=cosine, temperature=temperature)


class SasRecLayer(nn.Module):
    """Sections III.B and III.C of the paper: y = x + dropout(attention(LN(x))), y + dropout(FFN(LN(y))), with
    FFN(y) = W2 ReLU(W1 y + b1) + b2. Queries, keys and values have no bias, and nothing projects the heads' outputs."""

    def __init__(self, width: int, heads: int, hidden: int, options: HiddenOptions) -> None:
        super().__init__()
        self.heads = heads
        self.query = options.linear(width, width, bias=False)
        self.keys = options.linear(width, 2 * width, bias=False)
        self.hidden = nn.Sequential(options.linear(width, hidden), nn.ReLU(), options.linear(hidden, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = Dropout(options.dropout)

    def forward(self, x_NE: torch.Tensor, sequence: Sequence, *, newest: bool) -> torch.Tensor:
        """The outputs of all entries, (N, E), or of the newest of each sample, (B, E)."""

        def attention(query_BHQX: torch.Tensor, key_BHMX: torch.Tensor, value_BHMX: torch.Tensor) -> torch.Tensor:
            if not newest:  # entries stand first, so that no entry sees the places behind them
                return F.scaled_dot_product_attention(query_BHQX, key_BHMX, value_BHMX, is_causal=True)
            seen_BM = sequence.mask() | (torch.arange(sequence.max_length, device=x_NE.device) == 0)
            return softmax_attention(query_BHQX, key_BHMX, value_BHMX, seen_BM[:, None, None])

        normed_NE = self.norms[0](x_NE)
        x_RE, query_RE = (sequence.newest(x_NE), sequence.newest(normed_NE)) if newest else (x_NE, normed_NE)
        joined_RE = attended(
            sequence, self.query(query_RE), self.keys(normed_NE), attention, heads=self.heads, newest=newest, last=False
        )
        y_RE = x_RE + self.dropout(joined_RE)
        outputs_RE: torch.Tensor = y_RE + self.dropout(self.hidden(self.norms[1](y_RE)))
        return outputs_RE
