"""Recent: what a function gave for its last arguments, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """`recent[key]` is what `of(key)` gave. Any thread may read: each step is one step of a dict."""

    def __init__(
        self, of: Callable[[K], V], most: int, keeps: Callable[[K, V], bool] = lambda _key, _value: True
    ) -> None:
        """`most`: entries; a full one begins again. `keeps`: whether a value is kept."""
        super().__init__()
        self._of, self._most, self._keeps = of, most, keeps

    def __missing__(self, key: K) -> V:
        value = self._of(key)
        if self._keeps(key, value):
            if len(self) >= self._most:
                self.clear()
            self[key] = value
        return value
