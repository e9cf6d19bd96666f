"""How many bytes a rank's collective calls put on the wire: payload and headers, by the formula of each algorithm.

Sends and counts nothing. The formulas are gloo's over TCP (allgather.cc, allreduce.cc, alltoall.cc, broadcast.cc,
barrier.cc); NCCL's payload is the same, its headers are not known. Summed over all ranks they are exact; a rank's own
share is the mean where ranks differ.
"""
# W = world size (number of workers)

from __future__ import annotations

from collections.abc import Mapping

from shardkeep.compression.tower.exchange import Exchange

Parts = dict[str, int]
"""Bytes by part of the ledger: values, framing, and parts of packets."""

_HEADER_BYTES = 48
_TRANSFER = 3 * _HEADER_BYTES
"""Headers of a buffer that goes from one rank to another: each says that it is ready, then the buffer's own."""
_SEGMENT_BYTES = 1 << 20
"""The ring all-reduce cuts what it sums into pieces of at most this."""
DIRECT_BYTES = 32 << 10
"""What a rank has for all others goes straight to each up to this size: one hop, where a ring has W - 1, each of them
a switch of processes where ranks share cores."""


def goes_direct(num_bytes: int) -> bool:
    """Whether so many bytes in the CPU's memory go straight to each other rank."""
    return num_bytes <= DIRECT_BYTES


def all_gather(world_size: int, num_bytes: int, **parts: int) -> Parts:
    """Every rank's `num_bytes`: straight to each other rank, or a ring in which each buffer goes in two halves.

    `parts`: bytes that are no values, by the ledger's parts: `all_gather(2, packet.nbytes, indices=400)`. An empty
    buffer is not sent."""
    peers = world_size - 1
    if not num_bytes:
        return {}
    transfers = peers if goes_direct(num_bytes) else 2 * peers
    return _parts(peers * num_bytes, transfers, {part: peers * size for part, size in parts.items()})


def exchange(world_size: int, exchange: Exchange) -> Parts:
    """A round of a compressed sum: one packet to all others, or one to each."""
    packets, peers = exchange.packets, world_size - 1
    if packets.ndim == 1:
        return all_gather(world_size, packets.nbytes, **exchange.parts)
    parts = {part: peers * size for part, size in exchange.parts.items()}
    return _parts(peers * packets.shape[-1], peers, parts)


def all_reduce(world_size: int, num_bytes: int, element_bytes: int = 4) -> Parts:
    """A ring: reduce-scatter, then all-gather, each of W - 1 rounds."""
    peers = world_size - 1
    pieces = max(-(-num_bytes // _SEGMENT_BYTES), 2 * world_size)
    pieces += -pieces % world_size
    piece_bytes = -(-num_bytes // (pieces * element_bytes)) * element_bytes
    filled = -(-num_bytes // piece_bytes) if num_bytes else 0
    return _parts(2 * num_bytes * peers // world_size, 2 * filled * peers / world_size)


def broadcast(world_size: int, num_bytes: int, *, source: bool) -> Parts:
    """A tree; all of it is counted for the rank that it starts at."""
    return _parts((world_size - 1) * num_bytes, world_size - 1) if source else {}


def barrier(world_size: int) -> Parts:
    return _parts(0, (world_size - 1).bit_length())


def _parts(payload: int, transfers: float, parts: Mapping[str, int] | None = None) -> Parts:
    """The payload, whose `parts` are no values, and the headers of so many transfers."""
    beside = dict(parts or {})
    return beside | {"values": payload - sum(beside.values()), "framing": round(_TRANSFER * transfers)}
