"""What a compressed sum over ranks asks to be exchanged. A sum is a generator; it knows no network.

It yields an `Exchange`, is sent the packets that came of it, and returns the sum. Whoever drives it decides whether
that happens during the backward pass, after it, or within one process.
"""

# W = world size, R = bytes of a packet

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch


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


Sum = Generator[Exchange, torch.Tensor, torch.Tensor]
"""Returns the sum over ranks, float32 and flat: the same bits on every rank."""

T = TypeVar("T")


def in_the_same_rounds(
    sums: Sequence[Generator[Exchange, torch.Tensor, T]],
) -> Generator[Exchange, torch.Tensor, list[T]]:
    """Several sums of as many rounds each, their packets sent as one. Raises ValueError when they differ in rounds."""
    asked = [next(one) for one in sums]
    found: list[T] = []
    while not found:
        sizes = [exchange.packets.shape[-1] for exchange in asked]
        parts = sum((Counter(exchange.parts) for exchange in asked), Counter[str]())
        packets_WR = yield Exchange(torch.cat([exchange.packets for exchange in asked], -1), parts)
        asked = []
        for one, part_WR in zip(sums, torch.split(packets_WR, sizes, dim=-1), strict=True):
            try:
                asked.append(one.send(part_WR.contiguous()))
            except StopIteration as done:
                found.append(done.value)
    if asked:
        raise ValueError(f"{len(found)} of {len(sums)} sums are done, the others want another round")
    return found
