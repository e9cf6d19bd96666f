"""Which settings two configs have otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """A setting with its two values; None where one config does not have it."""

    keys: tuple[str, ...]
    before: Any
    now: Any

    @property
    def key(self) -> str:
        return ".".join(self.keys)

    def __str__(self) -> str:
        return f"{self.key}={json.dumps(self.now)} in place of {json.dumps(self.before)}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yields the settings that differ. A group that one config lacks is one setting."""
    for key in {**before, **now}:
        one, other, keys = before.get(key), now.get(key), (*above, key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, keys)
        elif one != other and repr(one) != repr(other):  # NaN is equal to none
            yield Difference(keys, one, other)


def listed(found: Sequence[Difference], most: int = 6) -> str:
    """The differences in words, the first ones if there are many."""
    more = [f"{len(found) - most} more"] if len(found) > most else []
    return ", ".join([*map(str, found[:most]), *more])
