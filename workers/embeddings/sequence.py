"""Sequence: what a model gets of a group of list columns: a row for each id, numbers beside them, and lengths.

Linear layers run on the entries (N, C); attention runs on the padded form. No operation reads a length on the host, so
all run under torch.compile and torch.export. Sums are added in the order of the entries, on every device.
"""

# B = samples, N = entries of all samples, L = max_length, D = embedding dim, S = numbers, C = any width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


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
    """The entries of B samples, sample after sample, oldest first. No id means padding: all rows belong to samples.

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

    def samples(self) -> torch.Tensor:
        """The sample of each entry, int64 (N,)."""
        samples_B = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return torch.repeat_interleave(samples_B, self.lengths, output_size=self.numbers.shape[0])

    def distances(self) -> torch.Tensor:
        """Entries of the same sample that are newer than each entry, int64 (N,)."""
        return self.lengths.cumsum(0).index_select(0, self.samples()) - 1 - self._entries()

    def mask(self, *, last: bool = False) -> torch.Tensor:
        """Which places of `padded` hold an entry: bool (B, L)."""
        places_L = torch.arange(self.max_length, device=self.lengths.device)
        return (places_L.flip(0) if last else places_L) < self.lengths[:, None]

    def padded(self, x_NC: torch.Tensor, *, last: bool = False) -> torch.Tensor:
        """(B, L, C): the entries of each sample at its first places, zeros behind them; `last`: at its last places."""
        shape = (self.lengths.shape[0], self.max_length)
        padded: torch.Tensor = _Scattered.apply(x_NC, self._places(last), shape[0] * shape[1])  # type: ignore[no-untyped-call]
        return padded.view(*shape, -1)

    def flat(self, x_BLC: torch.Tensor, *, last: bool = False) -> torch.Tensor:
        """(N, C): undoes `padded`."""
        flat: torch.Tensor = _Gathered.apply(x_BLC.flatten(0, 1), self._places(last))  # type: ignore[no-untyped-call]
        return flat

    def spread(self, x_BC: torch.Tensor) -> torch.Tensor:
        """(N, C): for each entry the row of its sample."""
        spread: torch.Tensor = _Spread.apply(x_BC, self.samples(), self.lengths)  # type: ignore[no-untyped-call]
        return spread

    def summed(self, x_NC: torch.Tensor) -> torch.Tensor:
        """(B, C): the sum of each sample's entries; zeros where it has none."""
        summed: torch.Tensor = _Summed.apply(x_NC, self.samples(), self.lengths)  # type: ignore[no-untyped-call]
        return summed

    def mean(self, x_NC: torch.Tensor) -> torch.Tensor:
        """(B, C): the mean of each sample's entries; zeros where it has none."""
        return self.summed(x_NC) / self.lengths.clamp(min=1)[:, None]

    def newest(self, x_NC: torch.Tensor) -> torch.Tensor:
        """(B, C): the newest entry of each sample; zeros where it has none."""
        ends_B = torch.where(self.lengths > 0, self.lengths.cumsum(0) - 1, x_NC.shape[0])
        return F.pad(x_NC, (0, 0, 0, 1)).index_select(0, ends_B)

    def followed(self, x_NC: torch.Tensor, next_BC: torch.Tensor) -> tuple[Sequence, torch.Tensor]:
        """The lengths with one more entry in each sample, the newest, and all entries (N + B, C)."""
        behind_B = self.lengths.cumsum(0) + torch.arange(self.lengths.shape[0], device=x_NC.device)
        places = torch.cat([self._entries() + self.samples(), behind_B])
        joined: torch.Tensor = _Scattered.apply(torch.cat([x_NC, next_BC]), places, places.shape[0])  # type: ignore[no-untyped-call]
        return Sequence({}, joined.detach()[:, :0], self.lengths + 1, self.max_length + 1), joined

    def _entries(self) -> torch.Tensor:
        return torch.arange(self.numbers.shape[0], device=self.lengths.device)

    def _places(self, last: bool) -> torch.Tensor:
        """Where each entry is among the B * L places, int64 (N,)."""
        samples_N, length = self.samples(), self.max_length
        if last:
            return samples_N * length + length - 1 - self.distances()
        starts_B = self.lengths.cumsum(0) - self.lengths
        return samples_N * length + self._entries() - starts_B.index_select(0, samples_N)


# torch.export takes it as an input; compiled towers need nothing of the kind.
torch.export.register_dataclass(Sequence, serialized_type_name="shardkeep.Sequence")


def _scatter(x_NC: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
    """Row n of the input at `places_N[n]` of zeros (`size`, C)."""
    return x_NC.new_zeros(size, x_NC.shape[1]).index_copy(0, places_N, x_NC)


def _sum(x_NC: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """(B, C), added in order on every device. It takes a fifth of index_add's time."""
    if not x_NC.shape[1]:  # torch refuses it on the CPU
        return x_NC.new_zeros(lengths_B.shape[0], 0)
    entries_N = torch.arange(x_NC.shape[0], device=x_NC.device)
    return F.embedding_bag(entries_N, x_NC, lengths_B.cumsum(0) - lengths_B, mode="sum")


class _Scattered(torch.autograd.Function):
    """`_scatter`, whose transpose takes the rows at the places."""

    @staticmethod
    def forward(ctx: Any, x_NC: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        return _scatter(x_NC, places_N, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gathered(torch.autograd.Function):
    """The rows at the places, whose transpose is `_scatter`."""

    @staticmethod
    def forward(ctx: Any, x_RC: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        ctx.size = x_RC.shape[0]
        return x_RC.index_select(0, places_N)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(grad, ctx.saved_tensors[0], ctx.size), None


class _Spread(torch.autograd.Function):
    """The row of each entry's sample, whose transpose is `_sum`."""

    @staticmethod
    def forward(ctx: Any, x_BC: torch.Tensor, samples_N: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(lengths_B)
        return x_BC.index_select(0, samples_N)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _sum(grad.contiguous(), ctx.saved_tensors[0]), None, None


class _Summed(torch.autograd.Function):
    """`_sum`, whose transpose is `_Spread`."""

    @staticmethod
    def forward(ctx: Any, x_NC: torch.Tensor, samples_N: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(samples_N)
        return _sum(x_NC, lengths_B)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
