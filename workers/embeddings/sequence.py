"""Sequence: what a model gets of a group of list columns: a row for each id, numbers beside them, and lengths."""

# B = samples, N = entries of all samples, L = max_length, D = embedding dim, S = numbers, C = any width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceShape:
    """What a model knows of a group before it sees one.

    Attributes:
        ids: Column -> values of a row (D).
        numbers: How many there are beside each entry (S).
        max_length: The most entries of a sample (L).
    """

    ids: Mapping[str, int]
    numbers: int
    max_length: int


@dataclass(frozen=True)
class Sequence:
    """The entries of B samples, sample after sample, oldest first. No id means padding: there are none here.

    Attributes:
        ids: Column -> the rows of its ids, float32 (N, D).
        numbers: Numbers beside them, float32 (N, S); S may be 0.
        lengths: Entries of each sample, int64 (B,), up to `max_length`.
        max_length: L.
    """

    ids: Mapping[str, torch.Tensor]
    numbers: torch.Tensor
    lengths: torch.Tensor
    max_length: int

    def mask(self) -> torch.Tensor:
        """Which places of `padded` hold an entry: bool (B, L)."""
        return torch.arange(self.max_length, device=self.lengths.device) < self.lengths[:, None]

    def padded(self, x_NC: torch.Tensor) -> torch.Tensor:
        """(B, L, C): the entries of each sample at its first places, zeros behind them."""
        mask_BL = self.mask()
        padded_BLC = x_NC.new_zeros((*mask_BL.shape, x_NC.shape[1]))
        return padded_BLC.masked_scatter(mask_BL[:, :, None], x_NC)

    def flat(self, x_BLC: torch.Tensor) -> torch.Tensor:
        """(N, C): undoes `padded`."""
        return x_BLC[self.mask()]


# torch.export takes it as an input; compiled towers need nothing of the kind.
torch.export.register_dataclass(Sequence, serialized_type_name="shardkeep.Sequence")
