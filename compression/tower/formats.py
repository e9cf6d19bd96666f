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

    def num_blocks(self, num_values: int) -> int:
        return -(-num_values // BLOCK) if self.peak else 0

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """bfloat16: the scales of groups of values by their largest magnitude; 1 for zeros."""
        scale = (largest * (_UP / self.peak)).to(torch.bfloat16)
        return scale.masked_fill_(scale == 0, 1.0)

    def codes(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The codes of values, each with the scale of its group."""
        scaled = values / scales
        return (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)

    def encode(self, values_HN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 to scales (H, G) and codes (H, N)."""
        if not self.peak:
            return values_HN.new_empty((len(values_HN), 0), dtype=torch.bfloat16), values_HN
        blocks = self._blocks(values_HN)
        scales = self.scales(blocks.abs().amax(-1, keepdim=True))
        return scales.squeeze(-1), self.codes(blocks, scales).flatten(1)[:, : values_HN.shape[1]]

    def decode(self, scales_HG: torch.Tensor, codes_HN: torch.Tensor) -> torch.Tensor:
        """float32 (H, N)."""
        if not self.peak:
            return codes_HN
        values = self._blocks(codes_HN).float().mul_(scales_HG.unsqueeze(-1))
        return values.flatten(1)[:, : codes_HN.shape[1]]

    def _blocks(self, values_HN: torch.Tensor) -> torch.Tensor:
        """(H, G, 64), filled up with zeros, which are not sent: of a thin product they would be most of the packet."""
        num_rows, num_values = values_HN.shape
        num_blocks = self.num_blocks(num_values)
        missing = BLOCK * num_blocks - num_values
        return (F.pad(values_HN, (0, missing)) if missing else values_HN).reshape(num_rows, num_blocks, BLOCK)


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
    num_shards = ranks.world_size if shards else 1
    mine_HN = [_shared_out(part, num_shards) for part in parts.values()]
    widths = [shares_HN.shape[1] for shares_HN in mine_HN]
    encoded = [fmt.encode(shares_HN) for shares_HN in mine_HN]
    lost_HN = [mine - fmt.decode(*codes) for mine, codes in zip(mine_HN, encoded, strict=True) if rests is not None]
    scale_bytes = SCALE_BYTES * sum(map(fmt.num_blocks, widths))
    by_part = {"scales": scale_bytes} if scale_bytes else {}
    packets_HR = _packed(encoded)
    packets_WR = yield Exchange(packets_HR if shards else packets_HR[0], by_part)
    totals = [_added(values_WN) for values_WN in _unpacked(packets_WR, widths, fmt)]
    if shards:
        encoded = [fmt.encode(total_1N) for total_1N in totals]
        for lost, total_1N, codes in zip(lost_HN, totals, encoded, strict=rests is not None):
            lost[ranks.rank] += (total_1N - fmt.decode(*codes))[0]
        packets_WR = yield Exchange(_packed(encoded)[0], by_part)
        totals = _unpacked(packets_WR, widths, fmt)
    if rests is not None:
        rests |= _joined(lost_HN, parts)
    return _joined(totals, parts)


def _shared_out(part: torch.Tensor, num_shards: int) -> torch.Tensor:
    """The values in equal shares, filled up with zeros: (H, N)."""
    missing = -part.numel() % num_shards
    flat = part.reshape(-1)
    return (F.pad(flat, (0, missing)) if missing else flat).view(num_shards, (part.numel() + missing) // num_shards)


def _joined(shares: Sequence[torch.Tensor], parts: Tensors) -> dict[str, torch.Tensor]:
    """The inverse of `_shared_out`, for each part; views where there is one share."""
    named = zip(parts.items(), shares, strict=True)
    return {name: share.reshape(-1)[: part.numel()].view(part.shape) for (name, part), share in named}


def _packed(encoded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A packet for each shard, uint8 (H, R): the scales of all parts, then their codes."""
    scales, codes = zip(*encoded, strict=True)
    return torch.cat([part.view(torch.uint8) for part in (*scales, *codes)], 1)


def _unpacked(packets_WR: torch.Tensor, widths: Sequence[int], fmt: Format) -> list[torch.Tensor]:
    """The values of each part in packets, float32 (W, N)."""
    blocks = [fmt.num_blocks(width) for width in widths]
    sizes = [SCALE_BYTES * sum(blocks), *(fmt.dtype.itemsize * width for width in widths)]
    scales, *codes = torch.split(packets_WR, sizes, dim=1)
    aligned = scales.reshape(-1).view(torch.bfloat16).view(len(packets_WR), sum(blocks))
    both = zip(torch.split(aligned, blocks, dim=1), codes, strict=True)
    return [fmt.decode(scales_WG, codes_WN.view(fmt.dtype)) for scales_WG, codes_WN in both]


def _added(values_WN: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, (1, N)."""
    total_1N, *others = torch.split(values_WN, 1)
    for values_1N in others:
        total_1N = total_1N + values_1N
    return total_1N
