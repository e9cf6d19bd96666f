"""Two forms of the tower's gradient on the wire: all values rounded, and the largest ones alone."""

# W = world size, N = values, K = kept values, P = parameters, R = bytes of a packet

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Sum, packet_of
from shardkeep.compression.tower.formats import (
    FP16,
    FP32,
    SCALE_BYTES,
    VALUES,
    BlockScaled,
    DenseFormat,
    padded,
    sum_in_rank_order,
    worth_sharding,
)
from shardkeep.compression.tower.residuals import Residuals

Shape = tuple[int, ...]
_FIRST = np.uint64(0)
SMALLEST = 1024
"""Values that a parameter needs for top-k to leave some out; smaller ones are sent whole."""


def num_values(shapes: Mapping[str, Shape]) -> int:
    """Values of parameters of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


@dataclass(frozen=True, slots=True)
class Rounded(DenseForm):
    """All values in one format; with `residuals`, what rounding loses is sent later."""

    fmt: DenseFormat
    num_values: int
    """Of all parameters, however many are summed together."""
    residuals: Residuals | None = None

    @property
    def has_residual(self) -> bool:
        return self.residuals is not None

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        shards = worth_sharding(self.num_values, ranks)
        if self.residuals is None:
            flat = [grad.reshape(-1) for grad in grads]
            return torch.cat((yield from sum_in_rank_order(flat, self.fmt, ranks, shards=shards)))
        parts, rests = [torch.empty(grad.numel(), device=grad.device) for grad in grads], list[torch.Tensor]()
        waits = self.residuals.add(names, grads, parts)
        totals = yield from sum_in_rank_order(parts, self.fmt, ranks, shards=shards, rests=rests)
        self.residuals.keep(names, rests, waits)
        return torch.cat(totals)


@dataclass(frozen=True, slots=True)
class TopK(DenseForm):
    """The `keep` largest of each parameter's values with their positions; what is left out is sent later.

    Every rank chooses its own. A packet holds the parameters' scales, the values, the positions: one size on all ranks.
    """

    keep: float
    fmt: BlockScaled
    residuals: Residuals
    has_residual = True

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        sizes = [grad.numel() for grad in grads]
        layout = _TopKPacket(sizes, [self.kept_of(size) for size in sizes], self.fmt)
        values_N = torch.empty(sum(sizes), device=grads[0].device)
        parts = list(torch.split(values_N, sizes))
        waits = self.residuals.add(names, grads, parts)
        packet_R, sent_N = layout.encode(parts)
        values_N -= sent_N
        packets_WR = yield Exchange(packet_R, layout.bytes_by_part)
        self.residuals.keep(names, parts, waits)
        return layout.added(packets_WR)

    def kept_of(self, size: int) -> int:
        """How many of a parameter's `size` values are sent; never none."""
        return size if size < SMALLEST else max(1, math.ceil(size * self.keep))


def rounded(config: TowerCompressionConfig, shapes: Mapping[str, Shape], residuals: Residuals) -> Rounded:
    """The forms that are named after their number format."""
    formats: dict[str, DenseFormat] = {"none": FP32, "fp16": FP16}
    return Rounded(formats[config.name], num_values(shapes))


def top_k(config: TowerCompressionConfig, shapes: Mapping[str, Shape], residuals: Residuals) -> TopK:
    return TopK(config.keep or 0.01, VALUES[config.values or "fp16"], residuals)


class _TopKPacket:
    """What a top-k packet holds and where; depends on the config and the parameters alone.

    Values of parameters that are sent whole come last, and have no positions.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], fmt: BlockScaled) -> None:
        self._fmt, self._sizes = fmt, sizes
        self._starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._some = [i for i, size in enumerate(sizes) if counts[i] < size]
        self._whole = [i for i, size in enumerate(sizes) if counts[i] == size]
        self._counts = [counts[i] for i in self._some + self._whole]
        self._num_values, self._num_kept = sum(sizes), sum(counts[i] for i in self._some)
        scales, values = SCALE_BYTES * len(sizes), fmt.dtype.itemsize * sum(counts)
        indices = coded_bytes(self._num_values, self._num_kept)
        self._edges = [scales, scales + values, scales + values + indices]
        self._size = padded(self._edges[2], 4)  # numbers in the next rank's packet stay aligned
        self.bytes_by_part = {"scales": scales, "indices": self._size - scales - values}

    def encode(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses; the packet, and what the others will read in it: (N,)."""
        device = parts[0].device
        chosen = [_largest(parts[i], count) for i, count in zip(self._some, self._counts, strict=False)]
        values = [parts[i][at] for i, at in zip(self._some, chosen, strict=True)] + [parts[i] for i in self._whole]
        peaks = [value.abs().amax() if value.numel() else value.new_zeros(()) for value in values]
        scales_P = self._fmt.scales(torch.stack(peaks))
        codes_K = self._fmt.codes(torch.cat(values), self._per_value(scales_P))
        at_K = [at + self._starts[i] for i, at in zip(self._some, chosen, strict=True)]
        positions = torch.cat(at_K) if at_K else torch.empty(0, dtype=torch.int64, device=device)
        packet_R = torch.zeros(self._size, dtype=torch.uint8, device=device)
        scales, values_end, end = self._edges
        packet_R[:scales] = scales_P.view(torch.uint8)
        packet_R[scales:values_end] = codes_K.view(torch.uint8)
        packet_R[values_end:end] = encode_positions(positions, self._num_values)
        sent_N = torch.zeros(self._num_values, device=device)
        sent_N[self._with_whole(positions)] = codes_K.float() * self._per_value(scales_P)
        return packet_R, sent_N

    def added(self, packets_WR: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values, in rank order, (N,); NaN where a rank's gradient was not finite."""
        total_N = torch.zeros(self._num_values, device=packets_WR.device)
        scales, values_end, end = self._edges
        for rank, packet_R in enumerate(packets_WR):
            scales_P = packet_R[:scales].view(torch.bfloat16)
            if not torch.isfinite(scales_P).all():
                total_N.fill_(math.nan)
                continue
            with packet_of(rank):
                positions = self._positions(packet_R[values_end:end])
            codes_K = packet_R[scales:values_end].view(self._fmt.dtype)
            total_N.index_add_(0, self._with_whole(positions), codes_K.float() * self._per_value(scales_P))
        return total_N

    def _positions(self, coded: torch.Tensor) -> torch.Tensor:
        """Of the parameters that are not sent whole. Raises CorruptMessage, also for so many of one that are not its
        own: they would take the scale of another."""
        positions = decode_positions(coded, self._num_values, self._num_kept)
        if not self._some:
            return positions
        ends = np.cumsum(self._counts[: len(self._some)])
        first, last = positions[torch.from_numpy(np.stack([np.append(0, ends[:-1]), ends - 1]))].tolist()  # they ascend
        for i, low, high in zip(self._some, first, last, strict=True):
            if low < self._starts[i] or high >= self._starts[i] + self._sizes[i]:
                raise CorruptMessage(f"positions {low} to {high} are not all of the values that they are said to be of")
        return positions

    def _per_value(self, scales_P: torch.Tensor) -> torch.Tensor:
        counts_P = torch.tensor(self._counts, device=scales_P.device)
        return scales_P.repeat_interleave(counts_P, output_size=sum(self._counts))

    def _with_whole(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions of all values in a packet."""
        ranges = [(self._starts[i], self._starts[i] + self._sizes[i]) for i in self._whole]
        return torch.cat([positions, *(torch.arange(*span, device=positions.device) for span in ranges)])


def _largest(values_N: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending positions of the `count` largest magnitudes."""
    sizes_N = values_N.abs()
    if sizes_N.device.type != "cpu":
        return torch.topk(sizes_N, count, sorted=False).indices.sort().values
    largest = np.argpartition(sizes_N.numpy(), sizes_N.numel() - count)[-count:]  # 4 times as fast as torch.topk
    return torch.from_numpy(np.sort(largest))


# Positions of the kept values in a vector, Rice coded and filled up with zeros to a size that all ranks know from n and
# k alone. About log2(n / k) + 2.5 bits per position, within half a bit of what is possible.


def coded_bytes(num_values: int, num_kept: int) -> int:
    """Bytes of `num_kept` coded positions below `num_values`; 0 for none."""
    low, high = _position_bits(num_values, num_kept)
    return -(-(num_kept * low + high) // 8)


def encode_positions(positions_K: torch.Tensor, num_values: int) -> torch.Tensor:
    """uint8; positions are int64, ascending, all different."""
    from shardkeep.compression.ids.set_kernels import write_rice  # here: only jobs with top-k load these kernels

    area = np.zeros(coded_bytes(num_values, positions_K.numel()), dtype=np.uint8)
    low, _ = _position_bits(num_values, positions_K.numel())
    write_rice(area, 0, positions_K.cpu().numpy(), 0, positions_K.numel(), _FIRST, low)
    return torch.from_numpy(area).to(positions_K.device)


def decode_positions(packet: torch.Tensor, num_values: int, num_kept: int) -> torch.Tensor:
    """The positions, int64 (K,). Raises CorruptMessage when the bytes are none of `num_kept` positions."""
    from shardkeep.compression.ids.set_kernels import OK, read_rice  # here: as above

    if packet.numel() != coded_bytes(num_values, num_kept):
        raise CorruptMessage(f"{packet.numel()} bytes are not {num_kept} positions of {num_values}")
    area, positions_K = packet.cpu().numpy(), np.empty(num_kept, dtype=np.int64)
    end = int(np.flatnonzero(area).max(initial=-1)) + 1  # what fills it up is no part of the code
    low, _ = _position_bits(num_values, num_kept)
    if read_rice(area, 0, end, num_kept, np.uint64(num_values), _FIRST, low, positions_K, 0) != OK:
        raise CorruptMessage(f"{packet.numel()} damaged bytes of {num_kept} positions of {num_values}")
    return torch.from_numpy(positions_K).to(packet.device)


def _position_bits(num_values: int, num_kept: int) -> tuple[int, int]:
    """Low bits of each position, and length of the unary part that holds the rest of all of them."""
    if not num_kept:
        return 0, 0
    low = (num_values // num_kept).bit_length() - 1
    return low, num_kept + ((num_values - 1) >> low)
