"""What encoders with attention share: the entries with places and a target, and queries, keys and values by heads."""

# B = samples, N = entries of all samples, R = N or B, E = width of an entry, M = places, H = heads, Q = M or 1

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.models.layers.axes import laid_out, named
from shardkeep.workers.models.layers.hidden import HiddenOptions

_DEVIATION = 0.01
"""Of the initial values of the places' vectors."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries (B, H, Q, X), keys and values (B, H, M, X) to (B, H, Q, X)."""


class Places(nn.Module):
    """Adds a learned vector of its place and the projected numbers to each entry. The target becomes the newest entry.

    Places count from the newest entry, so that they mean the same in short and long histories."""

    def __init__(self, shape: SequenceShape, options: HiddenOptions) -> None:
        super().__init__()
        width = entry_width(shape)
        vectors = nn.Parameter(torch.randn(shape.max_length + 1, width) * _DEVIATION)
        self.vectors = laid_out(vectors, shape.max_length + 1, width)
        self.numbers = options.linear(shape.numbers, width, bias=False) if shape.numbers else None

    def forward(
        self, entries_NE: torch.Tensor, target_BE: torch.Tensor | None, sequence: Sequence
    ) -> tuple[torch.Tensor, Sequence]:
        """The entries (N, E), or (N + B, E) with a target, and the sequence that they are of."""
        x_NE = entries_NE
        if self.numbers is not None:
            x_NE = x_NE + self.numbers(sequence.numbers)
        if target_BE is not None:
            sequence, x_NE = sequence.followed(x_NE, target_BE)
        return x_NE + F.embedding(sequence.distances(), self.vectors), sequence


def entry_width(shape: SequenceShape) -> int:
    """Values of an entry. As an axis it is another one with each further column: heads and norms take all of it."""
    width = sum(shape.ids.values())
    return named(width, width, lambda names: [(len(names), i) for i in range(len(names))])


def check_heads(width: int, heads: int, *, setting: str = "model.encoder.heads") -> None:
    """Raises UserError where heads would be of different widths."""
    if width % heads:
        raise UserError(
            f"{setting}: {heads} does not divide {width}, the values of the rows of an entry; "
            "allowed: a divisor, or tables of another dim"
        )


def attended(
    sequence: Sequence,
    query_RE: torch.Tensor,
    keys_NX: torch.Tensor,
    attention: Attention,
    *,
    heads: int,
    newest: bool,
    last: bool = True,
) -> torch.Tensor:
    """The attention of R queries, (R, E).

    Args:
        query_RE: Of all entries, or with `newest` of the newest of each sample.
        keys_NX: Keys and values of all entries side by side, (N, 2 E).
        last: `attention` has the entries at the last places, else at the first; see `Sequence.padded`.
    """
    key_BHMX, value_BHMX = _heads(sequence.padded(keys_NX, last=last), 2 * heads).chunk(2, dim=1)
    query_BQE = query_RE[:, None] if newest else sequence.padded(query_RE, last=last)
    joined_BQE = attention(_heads(query_BQE, heads), key_BHMX, value_BHMX).transpose(1, 2).flatten(2)
    return joined_BQE[:, 0] if newest else sequence.flat(joined_BQE, last=last)


def _heads(x_BMC: torch.Tensor, heads: int) -> torch.Tensor:
    return x_BMC.view(*x_BMC.shape[:2], heads, -1).transpose(1, 2)


def scores_of(query_BHQX: torch.Tensor, key_BHMX: torch.Tensor) -> torch.Tensor:
    """Products of queries and keys, (B, H, Q, M).

    Of one query the bits of a matrix product, and those of torch's attention, depend on where its sample is in memory.
    So scoring adds up products itself: the bits of a sample are the same at every place of a block."""
    if query_BHQX.shape[2] > 1 or torch.is_grad_enabled():
        return query_BHQX @ key_BHMX.transpose(2, 3)
    return (query_BHQX * key_BHMX).sum(3)[:, :, None]


def mixed(share_BHQM: torch.Tensor, value_BHMX: torch.Tensor) -> torch.Tensor:
    """Sums of values by their shares, (B, H, Q, X); as `scores_of`."""
    if share_BHQM.shape[2] > 1 or torch.is_grad_enabled():
        return share_BHQM @ value_BHMX
    return (share_BHQM.transpose(2, 3) * value_BHMX).sum(2, keepdim=True)


def softmax_attention(
    query_BHQX: torch.Tensor, key_BHMX: torch.Tensor, value_BHMX: torch.Tensor, seen_B1QM: torch.Tensor
) -> torch.Tensor:
    """Attention to the places that are seen, (B, H, Q, X); as `scores_of`."""
    if query_BHQX.shape[2] > 1 or torch.is_grad_enabled():
        return F.scaled_dot_product_attention(query_BHQX, key_BHMX, value_BHMX, attn_mask=seen_B1QM)
    scores_BHQM = scores_of(query_BHQX, key_BHMX) * query_BHQX.shape[3] ** -0.5
    return mixed(scores_BHQM.masked_fill(~seen_B1QM, -torch.inf).softmax(3), value_BHMX)
