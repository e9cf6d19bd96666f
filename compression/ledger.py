"""The byte ledger: how many bytes went which way, and what they were. Counts what it is told."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

DIRECTIONS = ("push", "pull", "tower", "read", "control")
Totals = dict[str, Any]
"""`{"push": {part: bytes}, "pull": {..}, "tower": {..}, "read": {..}, "control": bytes, "total": bytes}`, as in
summary.json. Pull counts both the ids asked for and the rows that came back; read is the same for evaluation."""


class Ledger:
    """Bytes by direction and part, of one process. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, direction: str, part: str, num_bytes: int) -> None:
        """Counts `num_bytes` more. `part` is a free word: ids, values, framing, gradients, ...

        Raises ValueError for an unknown direction or a negative number."""
        if direction not in DIRECTIONS or num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes of {direction!r}; allowed: 0 or more of {', '.join(DIRECTIONS)}")
        with self._lock:
            self._bytes[direction, part] += int(num_bytes)

    def totals(self) -> Totals:
        """A copy of the counts so far; parts in alphabetical order."""
        with self._lock:
            counts = dict(self._bytes)
        return _as_totals(counts)


def merge_totals(totals: Iterable[Mapping[str, Any]]) -> Totals:
    """The sum of several processes' totals; an empty sum is all zeros."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in totals:
        for direction in DIRECTIONS:
            parts = one[direction]
            for part, num_bytes in parts.items() if isinstance(parts, Mapping) else [("all", parts)]:
                counts[direction, part] += num_bytes
    return _as_totals(counts)


def _as_totals(counts: Mapping[tuple[str, str], int]) -> Totals:
    totals: Totals = {direction: {} for direction in DIRECTIONS}
    for (direction, part), num_bytes in sorted(counts.items()):
        totals[direction][part] = num_bytes
    totals["control"] = sum(totals["control"].values())
    return totals | {"total": sum(counts.values())}
