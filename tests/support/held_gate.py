"""A gate that holds pushes back: the longest delay of their application, which no timing can bring about."""

from __future__ import annotations

from typing import Any

from shardkeep.ps.server.consistency import Work
from shardkeep.ps.server.service import ShardService


class HeldGate:
    """Stands before the gate of a service: while `held`, pushes are acknowledged and none is applied."""

    def __init__(self, service: ShardService, inner: Any = None) -> None:
        """`inner`: the gate behind; None = that of the service."""
        self._service = service
        self._inner = service.applier.gate if inner is None else inner
        self.held = True
        service.applier.gate = self  # type: ignore[assignment]

    @property
    def stages(self) -> bool:
        return self.held or bool(self._inner.stages)

    def take(self) -> Work[Any] | None:
        return None if self.held else self._inner.take()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def release(self) -> None:
        """Lets the pushes that wait be applied, in the order of arrival, and the pulls that waited for them."""
        self.held = False
        self._service.applier.advance()
