"""MeteredCollective: books what collective calls put on the wire, by what each call says that it is for.

Around any collective: ranks that are threads book what processes would send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.transport.metered import LedgerMeter
from shardkeep.workers.collectives import wire_bytes as collective_bytes
from shardkeep.workers.collectives.collective import Collective, Purpose

_IN_LEDGER: dict[Purpose, tuple[str, str | None]] = {
    "parameters": ("tower", None),
    "gradients": ("tower", None),
    "buffers": ("tower", None),
    "agreements": ("control", "agreements"),
    "metrics": ("read", "metrics"),
}
"""Direction, and the one part that all bytes are; None = each byte is the part that it is."""


class MeteredCollective:
    """A collective that books this rank's bytes in a meter. Every call passes through to `collective`."""

    def __init__(self, collective: Collective, meter: LedgerMeter) -> None:
        self.rank = collective.rank
        self.world_size = collective.world_size
        self._collective = collective
        self._meter = meter

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._collective.process_group

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        return self._collective.mesh(device)

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        self._book(purpose, collective_bytes.exchange(self.world_size, exchange))
        return self._collective.begin_exchange(exchange, purpose=purpose)

    def begin_all_reduce_sum(self, tensor: torch.Tensor, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        self._book(purpose, collective_bytes.all_reduce(self.world_size, tensor.nbytes, tensor.element_size()))
        return self._collective.begin_all_reduce_sum(tensor, purpose=purpose)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose) -> None:
        parts = collective_bytes.broadcast(self.world_size, tensor.nbytes, source=self.rank == source)
        self._book(purpose, parts)
        self._collective.broadcast(tensor, source=source, purpose=purpose)

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose) -> None:
        self._book(purpose, collective_bytes.barrier(self.world_size))
        self._collective.barrier(timeout_s=timeout_s, purpose=purpose)

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._collective.guard(what)

    def before_close(self, callback: Callable[[], None]) -> None:
        self._collective.before_close(callback)

    def close(self) -> None:
        self._collective.close()

    def _book(self, purpose: Purpose, parts: collective_bytes.Parts) -> None:
        if self.world_size == 1 or not parts:
            return
        direction, whole = _IN_LEDGER[purpose]
        self._meter.book_among_workers(direction, {whole: sum(parts.values())} if whole else parts)
