"""MeteredCollective: books what collective calls put on the wire, by what each call says that it is for.

Around any collective: ranks that are threads book what processes would send.
"""
# W = world size (number of workers), N = values of one rank

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.transport.metered import LedgerMeter
from shardkeep.workers.collectives import wire_bytes as collective_bytes
from shardkeep.workers.collectives.collective import Array, Collective, Purpose

_IN_LEDGER: dict[Purpose, tuple[str, str | None]] = {
    "gradients": ("tower", None),
    "buffers": ("tower", None),
    "agreements": ("control", "agreements"),
    "metrics": ("read", "metrics"),
}
"""Direction, and the one part that all bytes are; None = each byte is the part that it is."""
_COUNT_BYTES = 8
"""An int64 that says a length."""


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

    def all_gather(self, tensor: torch.Tensor, *, purpose: Purpose) -> torch.Tensor:
        return self.begin_all_gather(tensor, purpose=purpose)()

    def begin_all_gather(self, tensor: torch.Tensor, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        self._book(purpose, collective_bytes.all_gather(self.world_size, tensor.nbytes))
        return self._collective.begin_all_gather(tensor, purpose=purpose)

    def exchange(self, exchange: Exchange, *, purpose: Purpose) -> torch.Tensor:
        self._book(purpose, collective_bytes.exchange(self.world_size, exchange))
        return self._collective.exchange(exchange, purpose=purpose)

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        self._book(purpose, collective_bytes.exchange(self.world_size, exchange))
        return self._collective.begin_exchange(exchange, purpose=purpose)

    def all_reduce_sum(self, tensor: torch.Tensor, *, purpose: Purpose) -> None:
        self._book(purpose, collective_bytes.all_reduce(self.world_size, tensor.nbytes, tensor.element_size()))
        self._collective.all_reduce_sum(tensor, purpose=purpose)

    def begin_all_reduce_sum(self, tensor: torch.Tensor, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        self._book(purpose, collective_bytes.all_reduce(self.world_size, tensor.nbytes, tensor.element_size()))
        return self._collective.begin_all_reduce_sum(tensor, purpose=purpose)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose) -> None:
        self._book_broadcast(purpose, tensor.nbytes, source)
        self._collective.broadcast(tensor, source=source, purpose=purpose)

    def broadcast_object(self, value: Any, *, source: int = 0, purpose: Purpose) -> Any:
        if self.rank == source:
            for num_bytes in (_COUNT_BYTES, len(json.dumps(value).encode())):
                self._book_broadcast(purpose, num_bytes, source)
        return self._collective.broadcast_object(value, source=source, purpose=purpose)

    def gather_arrays(self, values_N: Array, *, purpose: Purpose) -> list[Array]:
        parts = self._collective.gather_arrays(values_N, purpose=purpose)
        for num_bytes in (_COUNT_BYTES, max(part.nbytes for part in parts)):
            self._book(purpose, collective_bytes.all_gather(self.world_size, num_bytes))
        return parts

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose) -> None:
        self._book(purpose, collective_bytes.barrier(self.world_size))
        self._collective.barrier(timeout_s=timeout_s, purpose=purpose)

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._collective.guard(what)

    def before_close(self, callback: Callable[[], None]) -> None:
        self._collective.before_close(callback)

    def close(self) -> None:
        self._collective.close()

    def _book_broadcast(self, purpose: Purpose, num_bytes: int, source: int) -> None:
        self._book(purpose, collective_bytes.broadcast(self.world_size, num_bytes, source=self.rank == source))

    def _book(self, purpose: Purpose, parts: collective_bytes.Parts) -> None:
        if self.world_size == 1 or not parts:
            return
        direction, whole = _IN_LEDGER[purpose]
        self._meter.book_among_workers(direction, {whole: sum(parts.values())} if whole else parts)
