"""The byte ledger: counts the bytes that processes send each other, by direction and by part.

It counts a message once: over a socket, out of the sender's memory on one host, or within one process.
docs/guide/compression.md compares the counts with the kernel's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

DIRECTIONS = {
    "push": "gradients to the servers, and their acknowledgements",
    "pull": "ids to the servers, and the rows that come back",
    "tower": "dense gradients between workers",
    "read": "evaluation: its pulls and its metrics",
    "control": "everything else: the coordinator, questions to servers, agreements between workers",
}
PARTS = {
    "ids": "ids, raw or coded",
    "masks": "which of the requested ids have rows",
    "values": "numbers: rows, row gradients, dense gradients",
    "scales": "scales and zero points of quantized values",
    "moments": "sums of squares beside row gradients",
    "indices": "which elements of a row or of a dense gradient are sent",
    "framing": "headers, directories and padding of messages, and gloo's headers",
    "rpc": "what torch RPC adds to a message: the call, its name, sizes, lengths",
    "retries": "all of a message of a step that is trained again, because a generation was lost",
    "flush": "messages with residuals at the end of the job",
    "calls": "control: what members and coordinator say to each other",
    "questions": "control: questions to servers and their answers",
    "agreements": "control: what workers say to each other apart from gradients and metrics",
    "metrics": "read: what workers say to each other for the metrics of an evaluation",
}
"""Everything that a byte can be. Each is counted once."""

Totals = dict[str, Any]
"""`{"push": {part: bytes}, "pull": {..}, "tower": {..}, "read": {..}, "control": bytes, "to_servers": bytes,
"from_servers": bytes, "between_workers": bytes, "total": bytes}`, as in summary.json. The three ways are the same bytes
again, by the connections that they take (the coordinator's apart); `total` counts each once."""
_WAYS = ("to_servers", "from_servers", "between_workers")
_AMONG_WORKERS = ("agreements", "metrics")


class Ledger:
    """Bytes by direction and part, of one process. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._ways: Counter[str] = Counter()

    def add(self, direction: str, part: str, num_bytes: int, *, answer: bool = False) -> None:
        """Counts `num_bytes` more. `answer`: they come from a server.

        Raises ValueError for an unknown direction or part, or a negative number."""
        self.add_parts(direction, {part: num_bytes}, answer=answer)

    def add_parts(self, direction: str, parts: Mapping[str, int], *, answer: bool = False) -> None:
        """Counts the parts of one message, all at once. As `add`."""
        for part, num_bytes in parts.items():
            if direction not in DIRECTIONS or num_bytes < 0:
                raise ValueError(f"{num_bytes} bytes of {direction!r}; allowed: 0 or more of {', '.join(DIRECTIONS)}")
            if part not in PARTS:
                raise ValueError(f"{direction}: part {part!r}; allowed: {', '.join(PARTS)}")
        with self._lock:
            for part, num_bytes in parts.items():
                self._bytes[direction, part] += int(num_bytes)
                if direction == "tower" or part in _AMONG_WORKERS:
                    self._ways["between_workers"] += int(num_bytes)
                elif part != "calls":
                    self._ways["from_servers" if answer else "to_servers"] += int(num_bytes)

    def totals(self) -> Totals:
        """A copy of the counts so far; parts in alphabetical order."""
        with self._lock:
            counts, ways = dict(self._bytes), dict(self._ways)
        return _as_totals(counts, ways)


def merge_totals(totals: Iterable[Mapping[str, Any]]) -> Totals:
    """The sum of several processes' totals; an empty sum is all zeros."""
    counts: Counter[tuple[str, str]] = Counter()
    ways: Counter[str] = Counter()
    for one in totals:
        for direction in DIRECTIONS:
            parts = one[direction]
            for part, num_bytes in parts.items() if isinstance(parts, Mapping) else [("all", parts)]:
                counts[direction, part] += num_bytes
        for way in _WAYS:
            ways[way] += one[way]
    return _as_totals(counts, ways)


def _as_totals(counts: Mapping[tuple[str, str], int], ways: Mapping[str, int]) -> Totals:
    totals: Totals = {direction: {} for direction in DIRECTIONS}
    for (direction, part), num_bytes in sorted(counts.items()):
        totals[direction][part] = num_bytes
    totals["control"] = sum(totals["control"].values())
    return totals | {way: ways.get(way, 0) for way in _WAYS} | {"total": sum(counts.values())}
