"""A form of the user's own, whose exchanges and sums are checked: a wrong one is refused in one line."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from shardkeep.base.errors import UserError, first_line
from shardkeep.compression.ledger import PARTS
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Shapes, Sum
from shardkeep.compression.tower.memory import Memory


class OwnForm(DenseForm):
    """Wraps the `module:Class` of the name. Raises UserError where it cannot be built or breaks `DenseForm`."""

    def __init__(self, name: str, kind: Any, shapes: Shapes, memory: Memory, options: Mapping[str, Any]) -> None:
        self._name, self._device = name, memory.device
        try:
            self._form = kind(shapes, memory, **options)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            self._refuse(f"cannot be built with options {dict(options)} ({why})", "(shapes, memory, **options)")
        if not callable(getattr(self._form, "sum", None)):
            self._refuse("has no method sum", "sum(names, grads, ranks)")

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        rounds = self._form.sum(names, grads, ranks)
        if not isinstance(rounds, Generator):
            self._refuse(f"sum returns {_words(rounds)}", "a generator that yields an Exchange")
        received = None
        while True:
            try:
                exchange = rounds.send(received)
            except StopIteration as done:
                total = done.value
                break
            self._check_exchange(exchange, ranks.world_size)
            received = yield exchange
        if received is None:
            self._refuse("sum yields nothing", "one Exchange at least")
        expected = torch.empty(sum(grad.numel() for grad in grads), device=self._device)
        if _words(total) != _words(expected):
            self._refuse(f"sum returns {_words(total)}", _words(expected))
        return total  # type: ignore[no-any-return]

    def _check_exchange(self, exchange: Any, world_size: int) -> None:
        if not isinstance(exchange, Exchange):
            self._refuse(f"sum yields {_words(exchange)}", "an Exchange")
        packets, expected = exchange.packets, f"uint8 (R,) or ({world_size}, R) on {self._device}, R above 0"
        fits = isinstance(packets, torch.Tensor) and packets.dtype is torch.uint8 and packets.device == self._device
        if not fits or not packets.numel() or packets.shape[:-1] not in ((), (world_size,)):
            self._refuse(f"sum yields packets {_words(packets)}", expected)
        sizes = exchange.parts.values()
        if not exchange.parts.keys() <= PARTS.keys() or min(sizes, default=0) < 0 or sum(sizes) > packets.shape[-1]:
            parts = f"parts of a packet of {packets.shape[-1]} bytes: {', '.join(PARTS)}"
            self._refuse(f"sum yields parts {dict(exchange.parts)}", parts)

    def _refuse(self, what: str, expected: str) -> NoReturn:
        raise UserError(f"compression.tower.name: {self._name}: {what}; expected: {expected}")


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
