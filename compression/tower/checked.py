"""CheckedForm: a sum of the user's own, whose exchanges and results have the form that `DenseForm` states."""
# W = world size, R = bytes of a packet

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from shardkeep.base.plugging.own import Own, words
from shardkeep.compression.ledger import PARTS
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Sum


class CheckedForm(DenseForm):
    """Calls the form. Raises UserError for an exchange or a sum of another form."""

    def __init__(self, own: Own, device: torch.device) -> None:
        self._own, self._device = own, device

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        rounds, received = self._own.call("sum", names, grads, ranks), None
        if not isinstance(rounds, Generator):
            self._own.returned("sum", words(rounds), "a generator that yields an Exchange")
        while True:
            try:
                exchange = self._own.run("sum", rounds.send, received)
            except StopIteration as done:
                total = done.value
                break
            self._check_exchange(exchange, ranks.world_size)
            received = yield exchange
        if received is None:
            self._own.refuse("sum yielded nothing; expected an Exchange")
        expected = torch.empty(sum(grad.numel() for grad in grads), device=self._device)
        if words(total) != words(expected):
            self._own.returned("sum", words(total), words(expected))
        return total  # type: ignore[no-any-return]

    def _check_exchange(self, exchange: Any, world_size: int) -> None:
        if not isinstance(exchange, Exchange):
            self._own.refuse(f"sum yielded {words(exchange)}; expected an Exchange")
        packets, expected = exchange.packets, f"uint8 (R,) or ({world_size}, R) on {self._device}, R above 0"
        fits = isinstance(packets, torch.Tensor) and packets.dtype is torch.uint8 and packets.device == self._device
        if not fits or not packets.numel() or packets.shape[:-1] not in ((), (world_size,)):
            self._own.refuse(f"sum yielded packets {words(packets)}; expected {expected}")
        sizes = exchange.parts.values()
        if not exchange.parts.keys() <= PARTS.keys() or min(sizes, default=0) < 0 or sum(sizes) > packets.shape[-1]:
            expected = f"{', '.join(PARTS)} within {packets.shape[-1]} bytes"
            self._own.refuse(f"sum yielded parts {dict(exchange.parts)}; expected {expected}")
