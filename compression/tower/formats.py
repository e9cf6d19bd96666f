"""Number formats of the tower's gradients, the sum over ranks in one of them, and the forms that are no more than that.

Formats: fp32 as it is; fp16 and int8 with a bfloat16 scale for each block of 64 values, so that neither
small gradients vanish nor large ones overflow. All round to the nearest. What is not finite stays not finite.
"""

# W = world size, H = shards, S = values of a shard, G = blocks of a shard, R = bytes of a packet

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Shapes, Sum
from shardkeep.compression.tower.memory import Memory, Tensors

BLOCK = 64
"""Values that share a scale."""
SCALE_BYTES = 2
_UP = 1 + 2**-7
ONE_ROUND_BYTES = 1 << 16
"""Gradients below this go to everybody in one round: a second one would cost more than the bytes it saves."""


@dataclass(frozen=True, slots=True)
class Format:
    """Values as codes of `dtype`: `code = round(value / scale)`; with `peak` 0 as they are.

    The scale is the largest magnitude of a block / `peak`, a little larger so that bfloat16 does not round it down and
    the largest code does not overflow."""

    dtype: torch.dtype
    peak: float = 0.0

    @property
    def unit(self) -> int:
        """Values of a block."""
        return BLOCK if self.peak else 1

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """bfloat16: the scales of groups of values by their largest magnitude; 1 for zeros."""
        scale = (largest * (_UP / self.peak)).to(torch.bfloat16)
        return scale.masked_fill_(scale == 0, 1.0)

    def codes(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The codes of values, each with the scale of its group."""
        scaled = values / scales
        return (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)

    def encode(self, values_HS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 to scales (H, G) and codes (H, S); S is a multiple of `unit`."""
        if not self.peak:
            return values_HS.new_empty((len(values_HS), 0), dtype=torch.bfloat16), values_HS
        blocks = values_HS.view(len(values_HS), -1, BLOCK)
        scales = self.scales(blocks.abs().amax(-1, keepdim=True))
        return scales.squeeze(-1), self.codes(blocks, scales).flatten(1)

    def decode(self, scales_HG: torch.Tensor, codes_HS: torch.Tensor) -> torch.Tensor:
        """float32 (H, S)."""
        if not self.peak:
            return codes_HS
        blocks = codes_HS.view(len(codes_HS), -1, BLOCK).float()
        return blocks.mul_(scales_HG.unsqueeze(-1)).flatten(1)


FP32 = Format(torch.float32)
FP16, INT8 = Format(torch.float16, 32768.0), Format(torch.int8, 127.0)
VALUES = {"fp16": FP16, "int8": INT8}
"""What `compression.tower.values` names."""


@dataclass(frozen=True, slots=True)
class Rounded(DenseForm):
    """All values in one format; with `memory`, what rounding loses is sent later."""

    shapes: Shapes
    fmt: Format
    memory: Memory | None = None

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        shards = worth_sharding(sum(map(math.prod, self.shapes.values())), ranks)
        parts = grads if self.memory is None else self.memory.add(names, grads)
        rests: dict[str, torch.Tensor] | None = None if self.memory is None else {}
        named = dict(zip(names, parts, strict=True))
        totals = yield from sum_in_rank_order(named, self.fmt, ranks, shards=shards, rests=rests)
        if self.memory is not None and rests is not None:
            self.memory.keep(names, list(rests.values()))
        return torch.cat([total.view(-1) for total in totals.values()])


def none(shapes: Shapes, memory: Memory) -> Rounded:
    return Rounded(shapes, FP32)


def fp16(shapes: Shapes, memory: Memory) -> Rounded:
    return Rounded(shapes, FP16)


def worth_sharding(num_values: int, ranks: Ranks, one_round_bytes: int | None = None) -> bool:
    """Whether a sum of so many values goes in two rounds, with 2 (W-1)/W packets a rank, or in one, with W-1."""
    least = ONE_ROUND_BYTES if one_round_bytes is None else one_round_bytes
    return ranks.world_size > 2 and 4 * num_values >= least


def sum_in_rank_order(
    parts: Tensors,
    fmt: Format,
    ranks: Ranks,
    *,
    shards: bool = False,
    rests: dict[str, torch.Tensor] | None = None,
) -> Generator[Exchange, torch.Tensor, dict[str, torch.Tensor]]:
    """Adds the ranks' values: decoded rank 0 + rank 1 + ..., element by element. Returns the sums of the parts.

    Each part begins a block, and a shard of its own, so that its sum does not depend on the parts beside it.

    Args:
        parts: float32, by name.
        shards: each rank adds a share of every part and gives the encoded sum to the others, which rounds a second
            time (not in fp32). The same on all ranks.
        rests: receives this rank's residual of each part, the second rounding of its shard included; over all ranks,
            rests and sums make up all values.
    """
    layout = _Shards(parts, fmt, ranks.world_size if shards else 1)
    mine_HS = layout.joined()
    encoded = fmt.encode(mine_HS)
    rest_HS = None if rests is None else mine_HS - fmt.decode(*encoded)
    packets_HR = layout.packed(*encoded)
    if not shards:
        packets_WR = yield Exchange(packets_HR[0], layout.bytes_by_part)
        total_HS = _added(layout.unpacked(packets_WR)).unsqueeze(0)
    else:
        packets_WR = yield Exchange(packets_HR, layout.bytes_by_part)
        sum_1S = _added(layout.unpacked(packets_WR)).unsqueeze(0)
        encoded = fmt.encode(sum_1S)
        if rest_HS is not None:
            rest_HS[ranks.rank] += (sum_1S - fmt.decode(*encoded))[0]
        packets_WR = yield Exchange(layout.packed(*encoded)[0], layout.bytes_by_part)
        total_HS = layout.unpacked(packets_WR)
    if rests is not None and rest_HS is not None:
        rests |= layout.split(rest_HS)
    return layout.split(total_HS)


class _Shards:
    """Parts as one matrix of H shards, each with its share of every part, filled up with zeros to whole blocks.

    The zeros are not sent: of a thin product, or a tower's small parameters, they would be most of the packet.
    """

    def __init__(self, parts: Tensors, fmt: Format, num_shards: int) -> None:
        self._parts, self._fmt, self._num_shards = parts, fmt, num_shards
        self._shares = [-(-part.numel() // num_shards) for part in parts.values()]
        self._widths = [share + -share % fmt.unit for share in self._shares]
        self._scale_bytes = SCALE_BYTES * (sum(self._widths) // BLOCK) if fmt.peak else 0
        self.bytes_by_part = {"scales": self._scale_bytes} if self._scale_bytes else {}

    def joined(self) -> torch.Tensor:
        values_HS = next(iter(self._parts.values())).new_zeros((self._num_shards, sum(self._widths)))
        for part, share_HN in zip(self._parts.values(), self._rooms(values_HS), strict=True):
            missing = share_HN.numel() - part.numel()
            flat = part.reshape(-1)
            share_HN.copy_((F.pad(flat, (0, missing)) if missing else flat).view(share_HN.shape))
        return values_HS

    def split(self, values_HS: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inverse of `joined`; views where there is one shard."""
        shares = zip(self._parts.items(), self._rooms(values_HS), strict=True)
        return {name: share_HN.reshape(-1)[: part.numel()].view(part.shape) for (name, part), share_HN in shares}

    def _rooms(self, values_HS: torch.Tensor) -> list[torch.Tensor]:
        rooms = torch.split(values_HS, self._widths, dim=1)
        return [room_HN[:, :share] for room_HN, share in zip(rooms, self._shares, strict=True)]

    def packed(self, scales_HG: torch.Tensor, codes_HS: torch.Tensor) -> torch.Tensor:
        """A packet for each shard, uint8 (H, R), without what fills it up."""
        if not self._fmt.peak:
            return codes_HS.view(torch.uint8)
        return torch.cat([part.view(torch.uint8) for part in (scales_HG, *self._rooms(codes_HS))], 1)

    def unpacked(self, packets_WR: torch.Tensor) -> torch.Tensor:
        """The values in packets of one shard, float32 (W, S)."""
        if not self._fmt.peak:
            return packets_WR.view(torch.float32)
        codes_WS = packets_WR.new_zeros((len(packets_WR), sum(self._widths)), dtype=self._fmt.dtype)
        spans = [self._scale_bytes, *(share * self._fmt.dtype.itemsize for share in self._shares)]
        scales_WG, *shares = torch.split(packets_WR, spans, dim=1)
        for room_WN, share_WN in zip(self._rooms(codes_WS), shares, strict=True):
            room_WN.copy_(share_WN.view(self._fmt.dtype))
        scales = scales_WG.reshape(-1).view(torch.bfloat16).view(len(packets_WR), -1)  # aligned
        return self._fmt.decode(scales, codes_WS)


def _added(values_WS: torch.Tensor) -> torch.Tensor:
    total_S, *others = values_WS.unbind()
    for values_S in others:
        total_S = total_S + values_S
    return total_S
