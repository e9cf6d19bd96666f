"""The protocol of a sum over ranks: a generator that yields packets to exchange. It knows no network.

It yields an `Exchange`, is sent the packets that came of it, and returns the sum. Its driver decides whether
that happens during the backward pass, after it, or within one process.
"""

# W = world size, R = bytes of a packet

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from shardkeep.base.errors import CorruptMessage

Shapes = Mapping[str, tuple[int, ...]]
"""Of all trained parameters, by name."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round of packets between all ranks; what comes back is uint8 (W, R), in rank order."""

    packets: torch.Tensor
    """uint8: (R,) = one packet for every rank, or (W, R) = row r for rank r. R is above 0, the same on all ranks."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one packet that are no values, by part of the ledger: scales, indices, framing."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which rank of how many this is."""

    rank: int
    world_size: int


@contextlib.contextmanager
def packet_of(rank: int) -> Iterator[None]:
    """Has the errors of decoding a packet name the rank that sent it."""
    try:
        yield
    except CorruptMessage as error:
        raise CorruptMessage(f"the dense gradient of worker {rank}: {error}") from error


Sum = Generator[Exchange, torch.Tensor, torch.Tensor]
"""Returns the sum over ranks, float32 and flat: the same bits on every rank. Raises CorruptMessage, which names the
rank, for a packet that no rank can have sent."""


class DenseForm(Protocol):
    """A way to add gradients over ranks. The class is called with (shapes, memory, **options): the `Shapes` of all
    parameters, the `Memory` that holds all state of the form, and the options of the config."""

    depends_on_groups: ClassVar[bool] = False
    """Whether the bits of a sum depend on which parameters are summed together. They are all in a generation's first
    step and the buckets of DDP afterwards, so a recovery then changes bits in `sync` too."""

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        """The sum over ranks of some parameters' gradients (float32), flat, one after the other. Every rank gives the
        same parameters in the same order. Not finite somewhere where a gradient of any rank is not finite."""
        ...
