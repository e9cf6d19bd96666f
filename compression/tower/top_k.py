"""Top-k: the largest values of each of the tower's gradients with their positions; the others are sent later."""

# W = world size, N = values, K = sent values, P = parameters, R = bytes of a packet

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.ids.set_kernels import OK, read_rice, write_rice
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Shapes, Sum, packet_of
from shardkeep.compression.tower.formats import SCALE_BYTES, VALUES, Format
from shardkeep.compression.tower.memory import Memory

SMALLEST = 1024
"""Values that a parameter needs for top-k to leave some out; smaller ones are sent whole."""


class TopK(DenseForm):
    """The `keep` largest of each parameter's values, at least one. Every rank chooses its own."""

    def __init__(self, shapes: Shapes, memory: Memory, keep: float = 0.01, values: str = "fp16") -> None:
        self._memory, self._keep, self._fmt = memory, keep, VALUES[values]

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        sizes = [grad.numel() for grad in grads]
        layout = _Packet(sizes, self._keep, self._fmt)
        parts = self._memory.add(names, grads)
        packet_R = layout.encode(parts)
        left_N = torch.cat(parts).index_add_(0, *layout.decode(packet_R), alpha=-1)
        packets_WR = yield Exchange(packet_R, layout.bytes_by_part)
        self._memory.keep(names, torch.split(left_N, sizes))
        total_N = left_N.new_zeros(sum(sizes))
        for rank, packet_R in enumerate(packets_WR):
            with packet_of(rank):
                total_N.index_add_(0, *layout.decode(packet_R))
        return total_N


class _Packet:
    """The parameters' scales, the values, the positions. What is where depends on the config and the parameters alone.

    Values of parameters that are sent whole come last, and have no positions.
    """

    def __init__(self, sizes: Sequence[int], keep: float, fmt: Format) -> None:
        kept = [size if size < SMALLEST else max(1, math.ceil(size * keep)) for size in sizes]
        self._order = sorted(range(len(sizes)), key=lambda i: kept[i] == sizes[i])
        self._counts = [kept[i] for i in self._order]
        self._begins, self._ends = np.cumsum([0, *sizes])[[self._order, [i + 1 for i in self._order]]]
        self._num_some = sum(kept[i] < sizes[i] for i in self._order)
        self._fmt, self._num_values, self._num_coded = fmt, sum(sizes), sum(self._counts[: self._num_some])
        scales, values = SCALE_BYTES * len(sizes), fmt.dtype.itemsize * sum(kept)
        indices = coded_bytes(self._num_values, self._num_coded)
        gap = -(scales + values + indices) % 4  # numbers in the next rank's packet stay aligned
        self._sizes, self.bytes_by_part = [scales, values, indices, gap], {"scales": scales, "indices": indices + gap}

    def encode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Chooses; uint8 (R,)."""
        ordered = [parts[i] for i in self._order]
        chosen = [_largest(part, count) for part, count in zip(ordered, self._counts, strict=True)]
        values = [part[at] for part, at in zip(ordered, chosen, strict=True)]
        peaks = [value.abs().amax() if value.numel() else value.new_zeros(()) for value in values]
        scales_P = self._fmt.scales(torch.stack(peaks))
        codes_K = self._fmt.codes(torch.cat(values), self._per_value(scales_P))
        at_K = torch.cat([at + begin for at, begin in zip(chosen, self._begins.tolist(), strict=True)])
        coded = torch.from_numpy(encode_positions(at_K[: self._num_coded].cpu().numpy(), self._num_values))
        gap = torch.zeros(self._sizes[3], dtype=torch.uint8)
        return torch.cat([part.view(torch.uint8).to(at_K.device) for part in (scales_P, codes_K, coded, gap)])

    def decode(self, packet_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and values (K,). Raises CorruptMessage, also for positions in a parameter that are not its own:
        they would take the scale of another."""
        scales, codes, indices, _ = torch.split(packet_R, self._sizes)
        coded = decode_positions(indices.cpu().numpy(), self._num_values, self._num_coded)
        some, whole = slice(self._num_some), slice(self._num_some, None)
        low, high = (np.repeat(edges[some], self._counts[some]) for edges in (self._begins, self._ends))
        if ((coded < low) | (coded >= high)).any():
            raise CorruptMessage("positions are not all of the parameter that they are said to be of")
        spans = zip(self._begins[whole], self._ends[whole], strict=True)
        at_K = torch.from_numpy(np.concatenate([coded, *(np.arange(*span) for span in spans)])).to(packet_R.device)
        return at_K, codes.view(self._fmt.dtype).float() * self._per_value(scales.view(torch.bfloat16))

    def _per_value(self, scales_P: torch.Tensor) -> torch.Tensor:
        counts_P = torch.tensor(self._counts, device=scales_P.device)
        return scales_P.repeat_interleave(counts_P, output_size=sum(self._counts))


def _largest(values_N: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending positions of the `count` largest magnitudes."""
    sizes_N = values_N.abs()
    if count == values_N.numel():
        return torch.arange(count, device=values_N.device)
    if values_N.device.type != "cpu":
        return torch.topk(sizes_N, count, sorted=False).indices.sort().values
    largest = np.argpartition(sizes_N.numpy(), sizes_N.numel() - count)[-count:]  # 4 times as fast as torch.topk
    return torch.from_numpy(np.sort(largest))


# Positions of the sent values in a vector, Rice coded and filled up with zeros to a size that all ranks know from n and
# k alone. About log2(n / k) + 2.5 bits per position, within half a bit of what is possible.


def coded_bytes(num_values: int, num_kept: int) -> int:
    """Bytes of `num_kept` coded positions below `num_values`; 0 for none."""
    low, high = _position_bits(num_values, num_kept)
    return -(-(num_kept * low + high) // 8)


def encode_positions(positions_K: Ints, num_values: int) -> Bytes:
    """The code of ascending positions, all different."""
    area = np.zeros(coded_bytes(num_values, len(positions_K)), dtype=np.uint8)
    low, _ = _position_bits(num_values, len(positions_K))
    write_rice(area, 0, positions_K, 0, len(positions_K), np.uint64(0), low)
    return area


def decode_positions(area: Bytes, num_values: int, num_kept: int) -> Ints:
    """The positions (K,). Raises CorruptMessage when the bytes are none of `num_kept` positions."""
    positions_K = np.empty(num_kept, dtype=np.int64)
    end = int(np.flatnonzero(area).max(initial=-1)) + 1  # what fills it up is no part of the code
    low, _ = _position_bits(num_values, num_kept)
    if read_rice(area, 0, end, num_kept, np.uint64(num_values), np.uint64(0), low, positions_K, 0) != OK:
        raise CorruptMessage(f"{len(area)} damaged bytes of {num_kept} positions of {num_values}")
    return positions_K


def _position_bits(num_values: int, num_kept: int) -> tuple[int, int]:
    """Low bits of each position, and length of the unary part that holds the rest of all of them."""
    if not num_kept:
        return 0, 0
    low = (num_values // num_kept).bit_length() - 1
    return low, num_kept + ((num_values - 1) >> low)
