"""Number formats of the tower's gradients, and the sum over ranks in one of them, added in rank order.

Formats: fp32 as it is; fp16 and int8 with a bfloat16 scale for each block of 64 values, so that neither
small gradients vanish nor large ones overflow. All round to the nearest. What is not finite stays not finite.
"""

# W = world size, N = values, H = shards, S = values of a shard, G = blocks, R = bytes of a packet

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from shardkeep.compression.tower.exchange import Exchange, Ranks

BLOCK = 64
"""Values that share a scale."""
SCALE_BYTES = 2
_UP = 1 + 2**-7
ONE_ROUND_BYTES = 1 << 16
"""Gradients below this go to everybody in one round: a second one would cost more than the bytes it saves."""


class DenseFormat(Protocol):
    """Values to bytes and back. Leading dimensions are kept; `unit` divides the last one."""

    @property
    def unit(self) -> int: ...

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        """float32 (..., N) to uint8 (..., R)."""
        ...

    def decode(self, packet_R: torch.Tensor) -> torch.Tensor:
        """uint8 (..., R) to float32 (..., N); a view where it can be one."""
        ...

    def scale_bytes(self, num_values: int) -> int:
        """Bytes of a packet of `num_values` that are scales."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """float32."""

    unit: int = 1

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N.contiguous().view(torch.uint8)

    def decode(self, packet_R: torch.Tensor) -> torch.Tensor:
        return packet_R.view(torch.float32)

    def scale_bytes(self, num_values: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """`code = round(value / scale)`; the scale is the largest magnitude / `peak`, a little larger so that bfloat16 does
    not round it down and the largest code does not overflow."""

    dtype: torch.dtype
    peak: float
    unit: int = BLOCK

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """bfloat16: the scales of groups of values by their largest magnitude; 1 for zeros."""
        scale = (largest * (_UP / self.peak)).to(torch.bfloat16)
        return scale.masked_fill_(scale == 0, 1.0)

    def codes(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scaled = values / scales
        return (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        blocks_G = values_N.view(*values_N.shape[:-1], -1, BLOCK)
        scales_G = self.scales(blocks_G.abs().amax(-1, keepdim=True))
        codes_N = self.codes(blocks_G, scales_G).flatten(-2)
        return torch.cat([scales_G.squeeze(-1).view(torch.uint8), codes_N.view(torch.uint8)], -1)

    def decode(self, packet_R: torch.Tensor) -> torch.Tensor:
        num_blocks = packet_R.shape[-1] // (SCALE_BYTES + BLOCK * self.dtype.itemsize)
        scales_G = packet_R[..., : SCALE_BYTES * num_blocks].view(torch.bfloat16)
        codes_N = packet_R[..., SCALE_BYTES * num_blocks :].view(self.dtype)
        blocks_G = codes_N.view(*codes_N.shape[:-1], num_blocks, BLOCK).float()
        values_N: torch.Tensor = blocks_G.mul_(scales_G.unsqueeze(-1)).flatten(-2)
        return values_N

    def scale_bytes(self, num_values: int) -> int:
        return SCALE_BYTES * (num_values // BLOCK)


FP32 = Plain()
FP16, INT8 = BlockScaled(torch.float16, 32768.0), BlockScaled(torch.int8, 127.0)
VALUES = {"fp16": FP16, "int8": INT8}
"""What `compression.tower.values` names."""


def padded(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


def worth_sharding(num_values: int, ranks: Ranks, one_round_bytes: int | None = None) -> bool:
    """Whether a sum of so many values goes in two rounds, with 2 (W-1)/W packets a rank, or in one, with W-1."""
    least = ONE_ROUND_BYTES if one_round_bytes is None else one_round_bytes
    return ranks.world_size > 2 and 4 * num_values >= least


def sum_in_rank_order(
    parts: Sequence[torch.Tensor],
    fmt: DenseFormat,
    ranks: Ranks,
    *,
    shards: bool,
    rests: list[torch.Tensor] | None = None,
) -> Generator[Exchange, torch.Tensor, list[torch.Tensor]]:
    """Adds the ranks' values: decoded rank 0 + rank 1 + ..., element by element.

    Each part begins a block, and a shard of its own, so that its sum does not depend on the parts beside it.

    Args:
        parts: flat, float32.
        shards: each rank adds a share of every part and gives the encoded sum to the others, which rounds a second
            time (not in fp32). The same on all ranks.
        rests: receives this rank's residual, the second rounding of its shard included;
            over all ranks, rests and sums make up all values.
    """
    layout = _Shards([part.numel() for part in parts], fmt, ranks.world_size if shards else 1)
    mine_HS = layout.joined(parts)
    packets_HR = fmt.encode(mine_HS)
    rest_HS = None if rests is None else mine_HS - fmt.decode(packets_HR)
    if not shards:
        packets_WR = yield layout.exchange(packets_HR[0])
        total_HS = _added(fmt, layout.filled(packets_WR)).unsqueeze(0)
    else:
        packets_WR = yield layout.exchange(packets_HR)
        sum_S = _added(fmt, layout.filled(packets_WR))
        packet_R = fmt.encode(sum_S)
        if rest_HS is not None:
            rest_HS[ranks.rank] += sum_S - fmt.decode(packet_R)
        packets_WR = yield layout.exchange(packet_R)
        total_HS = fmt.decode(layout.filled(packets_WR))
    if rests is not None and rest_HS is not None:
        rests.extend(layout.split(rest_HS))
    return layout.split(total_HS)


class _Shards:
    """Parts as one matrix of H shards, each with its share of every part, filled up with zeros to whole blocks.

    The zeros are not sent: of a thin product, or a tower's small parameters, they would be most of the packet.
    """

    def __init__(self, sizes: Sequence[int], fmt: DenseFormat, num_shards: int) -> None:
        self._sizes, self._num_shards = sizes, num_shards
        self._shares = [-(-size // num_shards) for size in sizes]
        self._widths = [padded(share, fmt.unit) for share in self._shares]
        self._gaps = [width - share for width, share in zip(self._widths, self._shares, strict=True)]
        self._width = sum(self._widths)
        self._scales = fmt.scale_bytes(self._width)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        values_HS = parts[0].new_zeros((self._num_shards, self._width))
        for part, share_HN in zip(parts, self._split(values_HS), strict=True):
            missing = share_HN.numel() - part.numel()
            share_HN.copy_((F.pad(part, (0, missing)) if missing else part).view(share_HN.shape))
        return values_HS

    def split(self, values_HS: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `joined`; views where there is one shard."""
        shares = self._split(values_HS)
        return [share_HN.reshape(-1)[:size] for share_HN, size in zip(shares, self._sizes, strict=True)]

    def _split(self, values_HS: torch.Tensor) -> list[torch.Tensor]:
        rooms = torch.split(values_HS, self._widths, dim=1)
        return [room_HN[:, :share] for room_HN, share in zip(rooms, self._shares, strict=True)]

    def exchange(self, packets: torch.Tensor) -> Exchange:
        """A round of encoded shards, uint8 (..., R), without what fills them up."""
        if any(self._gaps):
            size = (packets.shape[-1] - self._scales) // self._width
            spans = [size * span for both in zip(self._shares, self._gaps, strict=True) for span in both]
            scales, *values = torch.split(packets, [self._scales, *spans], dim=-1)
            packets = torch.cat([scales, *values[::2]], -1)
        return Exchange(packets, {"scales": self._scales} if self._scales else {})

    def filled(self, packets_WR: torch.Tensor) -> torch.Tensor:
        """What came of `exchange`, as it was encoded."""
        if not any(self._gaps):
            return packets_WR
        size = (packets_WR.shape[-1] - self._scales) // sum(self._shares)
        spans = [size * share for share in self._shares]
        scales, *shares = torch.split(packets_WR, [self._scales, *spans], dim=-1)
        zeros = packets_WR.new_zeros((len(packets_WR), size * max(self._gaps)))
        filled = [scales]
        for share, gap in zip(shares, self._gaps, strict=True):
            filled += [share, zeros[:, : size * gap]]
        return torch.cat(filled, -1)


def _added(fmt: DenseFormat, packets_WR: torch.Tensor) -> torch.Tensor:
    total_N, *others = fmt.decode(packets_WR).unbind()
    for values_N in others:
        total_N = total_N + values_N
    return total_N
