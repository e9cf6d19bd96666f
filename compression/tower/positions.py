"""Positions of the kept values in a vector, Elias-Fano coded: a size that all ranks know from n and k alone.

About log2(n / k) + 2.5 bits per position, within half a bit of what is possible.
"""

# K = kept values

from __future__ import annotations

import torch

from shardkeep.base.errors import CorruptMessage


def coded_bytes(num_values: int, num_kept: int) -> int:
    """Bytes of `num_kept` coded positions below `num_values`; 0 for none."""
    low, high = _bits(num_values, num_kept)
    return -(-(num_kept * low + high) // 8)


def encode_positions(positions_K: torch.Tensor, num_values: int) -> torch.Tensor:
    """uint8; positions are int64, ascending, all different."""
    num_kept, device = positions_K.numel(), positions_K.device
    low, _ = _bits(num_values, num_kept)
    bits = torch.zeros(8 * coded_bytes(num_values, num_kept), dtype=torch.uint8, device=device)
    lows = (positions_K[:, None] >> torch.arange(low, device=device)) & 1
    bits[: num_kept * low] = lows.view(-1).to(torch.uint8)
    bits[num_kept * low + (positions_K >> low) + torch.arange(num_kept, device=device)] = 1
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=device)).sum(1, dtype=torch.uint8)


def decode_positions(packet: torch.Tensor, num_values: int, num_kept: int) -> torch.Tensor:
    """The positions, int64 (K,). Raises CorruptMessage when the bytes are none of `num_kept` positions."""
    device = packet.device
    low, high = _bits(num_values, num_kept)
    if packet.numel() != coded_bytes(num_values, num_kept):
        raise CorruptMessage(f"{packet.numel()} bytes are not {num_kept} positions of {num_values}")
    bits = ((packet[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1).view(-1)
    lows_K = (bits[: num_kept * low].view(num_kept, low).long() << torch.arange(low, device=device)).sum(1)
    ones_K = bits[num_kept * low : num_kept * low + high].nonzero().view(-1)
    if ones_K.numel() != num_kept:
        raise CorruptMessage(f"{ones_K.numel()} positions came, not {num_kept} of {num_values}")
    positions_K = ((ones_K - torch.arange(num_kept, device=device)) << low) + lows_K
    if not num_kept:
        return positions_K
    if int(positions_K.max()) >= num_values:
        raise CorruptMessage(f"position {int(positions_K.max())} of {num_values}")
    if not bool((positions_K[1:] > positions_K[:-1]).all()):
        raise CorruptMessage(f"{num_kept} positions of {num_values} are not in order")
    return positions_K


def _bits(num_values: int, num_kept: int) -> tuple[int, int]:
    """Low bits of each position, and length of the unary part that holds the rest of all of them."""
    if not num_kept:
        return 0, 0
    low = (num_values // num_kept).bit_length() - 1
    return low, num_kept + ((num_values - 1) >> low)
