"""What ranks do together beside the calls of a Collective: gathers and blocking sums, made of those calls alone."""

# W = world size (number of workers), N = values of one rank, R = bytes of a packet

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.workers.collectives.collective import Collective, Purpose

Array = NDArray[Any]


def exchange_packets(collective: Collective, exchange: Exchange, *, purpose: Purpose) -> torch.Tensor:
    """One round of packets: uint8 (W, R), in rank order. Blocks."""
    with collective.guard("exchange"):
        return collective.begin_exchange(exchange, purpose=purpose)()


def all_gather(collective: Collective, tensor: torch.Tensor, *, purpose: Purpose) -> torch.Tensor:
    """The ranks' tensors (same shape and dtype) stacked in rank order: (W, ...). Blocks."""
    return begin_all_gather(collective, tensor, purpose=purpose)()


def begin_all_gather(collective: Collective, tensor: torch.Tensor, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
    """Starts an `all_gather`; the function that it returns waits, and is called once."""
    shape = (collective.world_size, *tensor.shape)
    if not tensor.numel():  # gloo hangs on empty tensors
        return lambda: tensor.new_empty(shape)
    guarded = collective.guard("all_gather")  # an error of the wait says how long ago that was
    with collective.guard("all_gather"):
        packet_R = tensor.detach().contiguous().view(-1).view(torch.uint8)
        packets = collective.begin_exchange(Exchange(packet_R), purpose=purpose)

    def wait() -> torch.Tensor:
        with guarded:
            return packets().view(tensor.dtype).view(shape)

    return wait


def all_reduce_sum(collective: Collective, tensor: torch.Tensor, *, purpose: Purpose) -> None:
    """Replaces `tensor` by the sum over ranks. Blocks."""
    with collective.guard("all_reduce"):
        collective.begin_all_reduce_sum(tensor, purpose=purpose)()


def broadcast_object(collective: Collective, value: Any, *, source: int = 0, purpose: Purpose) -> Any:
    """The value of rank `source` on every rank; anything JSON can hold. Blocks."""
    text = json.dumps(value).encode() if collective.rank == source else b""
    size = torch.tensor([len(text)])
    collective.broadcast(size, source=source, purpose=purpose)
    buffer = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)
    collective.broadcast(buffer, source=source, purpose=purpose)
    return json.loads(buffer.numpy().tobytes())


def gather_arrays(collective: Collective, values_N: Array, *, purpose: Purpose) -> list[Array]:
    """Every rank's array in rank order; one dimension, one dtype, lengths may differ. Blocks."""
    counts_W = all_gather(collective, torch.tensor([len(values_N)]), purpose=purpose).view(-1).tolist()
    padded = np.zeros(max(counts_W), values_N.dtype)
    padded[: len(values_N)] = values_N
    parts = all_gather(collective, torch.from_numpy(padded.view(np.uint8)), purpose=purpose).numpy()
    return [part.view(values_N.dtype)[:n].copy() for part, n in zip(parts, counts_W, strict=True)]
