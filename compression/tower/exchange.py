"""What a compressed sum over ranks asks to be exchanged. A sum is a generator; it knows no network.

It yields an `Exchange`, is sent the packets that came of it, and returns the sum. Its driver decides whether
that happens during the backward pass, after it, or within one process.
"""

# W = world size, R = bytes of a packet

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardkeep.base.errors import CorruptMessage


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round of packets between all ranks; what comes back is uint8 (W, R), in rank order."""

    packets: torch.Tensor
    """uint8: (R,) = one packet for every rank, or (W, R) = row r for rank r. R is the same on all ranks."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one packet that are no values: scales, indices."""


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
    """A way to add gradients over ranks. A form without a state leaves all but `sum` as it is here."""

    @property
    def has_residual(self) -> bool:
        """Whether what is not sent waits in the residuals that the form was made with."""
        return False

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        """The sum over ranks of some parameters' gradients (float32), flat, one after the other. Every rank gives the
        same parameters in the same order; which ones are summed together changes no bit of it."""
        ...

    def settle(self, applied: bool) -> None:
        """Ends a step: its changes count, or it never was."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks; live tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a copy. Raises ValueError when it does not fit."""
        return
