"""How many bytes a rank's collective calls put on the wire: payload and headers, by the formula of each algorithm.

Sends nothing. The formulas are gloo's over TCP (allgather.cc, allreduce.cc, alltoall.cc, broadcast.cc, barrier.cc);
NCCL's payload is the same, its headers are not known. Summed over all ranks they are exact; a rank's own share is the
mean where ranks differ.
"""
# W = world size (number of workers)

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardkeep.compression.exchange import Exchange
from shardkeep.compression.ledger import Ledger

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


class Sent:
    """What one rank has sent; tells the ledger what each of it was for. Not thread safe."""

    def __init__(self, world_size: int) -> None:
        self.total = 0
        """Bytes so far, headers included."""
        self._world_size = world_size
        self._untold: Counter[str] = Counter()

    def all_gather(self, num_bytes: int, **parts: int) -> None:
        """Every rank's `num_bytes`: straight to each other rank, or a ring in which each buffer goes in two halves.

        `parts`: those among them that are no values, by the ledger's parts: `all_gather(packet.nbytes, indices=400)`.
        """
        peers = self._world_size - 1
        transfers = peers if goes_direct(num_bytes) else 2 * peers
        self._add({part: peers * size for part, size in parts.items()}, peers * num_bytes, transfers)

    def exchange(self, exchange: Exchange) -> None:
        """A round of a compressed sum: one packet to all others, or one to each."""
        packets = exchange.packets
        if packets.ndim == 1:
            self.all_gather(packets.nbytes, **exchange.parts)
        else:
            peers = self._world_size - 1
            parts = {part: peers * size for part, size in exchange.parts.items()}
            self._add(parts, peers * packets.shape[-1], peers)

    def all_reduce(self, num_bytes: int, element_bytes: int = 4) -> None:
        """A ring: reduce-scatter, then all-gather, each of W - 1 rounds."""
        world, peers = self._world_size, self._world_size - 1
        pieces = max(-(-num_bytes // _SEGMENT_BYTES), 2 * world)
        pieces += -pieces % world
        piece_bytes = _up(-(-num_bytes // pieces), element_bytes)
        filled = -(-num_bytes // piece_bytes) if num_bytes else 0
        self._add({}, 2 * num_bytes * peers // world, 2 * filled * peers / world)

    def broadcast(self, num_bytes: int, *, source: bool) -> None:
        """A tree; all of it is counted for the rank that it starts at."""
        if source:
            self._add({}, (self._world_size - 1) * num_bytes, self._world_size - 1)

    def barrier(self) -> None:
        self._add({}, 0, (self._world_size - 1).bit_length())

    def tell(self, ledger: Ledger, direction: str, *, again: bool = False) -> None:
        """Counts what was sent since the last time: of tower by its parts, of control as agreements, of read as
        metrics; `again`: of a step that is trained again."""
        untold, self._untold = self._untold, Counter()
        whole = "retries" if again else {"control": "agreements", "read": "metrics"}.get(direction)
        for part, num_bytes in untold.items():
            ledger.add(direction, whole or part, num_bytes)

    def _add(self, parts: Mapping[str, int], payload: int, transfers: float) -> None:
        headers = round(_TRANSFER * transfers)
        self.total += payload + headers
        self._untold.update(parts)
        self._untold["values"] += payload - sum(parts.values())
        self._untold["framing"] += headers


def _up(number: int, unit: int) -> int:
    """`number` rounded up to a multiple of `unit`."""
    return -(-number // unit) * unit
