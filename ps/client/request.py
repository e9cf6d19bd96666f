"""Reading rows as a worker does: which of a step's rows must be asked for, and where each comes from.

Without a cache all are. With one, rows whose lease runs come out of the memory, and those that another step has asked
for already out of its answer. Knows no transport.
"""
# V = ids of all tables in a step, M = ids asked for, D = embedding dim, T = tables

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.ps import placement_kernels
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.jagged import JaggedIds, Layout
from shardkeep.ps.placement import Split, split


@dataclass(frozen=True, slots=True)
class Request:
    """A step's unique ids per table, placed and split; made ahead of the pull, needed again by the push."""

    ids: JaggedIds
    split: Split


@dataclass(slots=True, eq=False)
class Fetch:
    """A step's ids, and those of them that the servers are asked for."""

    step: int
    request: Request
    missing: Request
    """What goes to the servers."""
    flat: Floats | None = None
    """Rows of the request, those out of the memory in their places; None = all are asked for."""
    places_M: Ints | None = None
    """Where each id asked for stands in the request; None = they are the same."""
    borrowed: list[tuple[Fetch, Ints, Ints]] = field(default_factory=list)
    """(another step, places among what it asked for, places here) of rows that are on their way."""
    answer: Floats | None = None
    """The rows asked for, once they are here, for those who borrow them."""


class Cache:
    """Spares pulls: rows are read once in `lease` steps. For one worker; not thread safe."""

    def __init__(self, memory: RowMemory, *, lease: int, window: int, num_servers: int) -> None:
        self._memory = memory
        self._lease = lease
        self._num_servers = num_servers
        self._under_way: deque[Fetch] = deque(maxlen=window)
        self.hits = self.misses = 0
        """Rows that were not asked for, and those that were."""

    def fetch(self, step: int, request: Request) -> Fetch:
        """Finds what of a request must be asked for."""
        ids, layout = request.ids, request.ids.layout
        flat = np.empty(layout.num_values, dtype=np.float32)
        known_V = self._memory.lookup(step, ids, flat)
        borrowed = []
        for other in self._under_way:
            if other.answer is not None or step - other.step > self._lease:
                continue
            at_V = find(ids, other.missing.ids)
            mine = np.flatnonzero((at_V >= 0) & ~known_V)
            if mine.size:
                borrowed.append((other, at_V[mine], mine))
                known_V[mine] = True
        places_M = np.flatnonzero(~known_V)
        self.hits += ids.ids_V.size - places_M.size
        self.misses += places_M.size
        counts_T = np.diff(np.searchsorted(places_M, layout.starts_T1))
        missing = JaggedIds(Layout.of_counts(layout.catalog, counts_T), ids.ids_V[places_M], ids.names)
        fetch = Fetch(step, request, Request(missing, split(missing, self._num_servers)), flat, places_M, borrowed)
        self._under_way.append(fetch)
        return fetch

    def fill(self, fetch: Fetch, answer: Floats) -> Floats:
        """All rows of the request, from the answer to what was asked for and from where the others are."""
        flat, layout = fetch.flat, fetch.request.ids.layout
        assert flat is not None and fetch.places_M is not None
        _put(fetch.missing.ids.layout, answer, np.arange(fetch.places_M.size), layout, fetch.places_M, flat)
        for other, theirs, mine in fetch.borrowed:
            assert other.answer is not None  # answers are read in the order of their steps
            _put(other.missing.ids.layout, other.answer, theirs, layout, mine, flat)
        fetch.borrowed = []
        fetch.answer = answer
        self._memory.store(fetch.step, fetch.missing.ids, answer)
        return flat

    def forget(self) -> None:
        """Forgets what is under way: it will not come."""
        self._under_way.clear()


def find(ids: JaggedIds, among: JaggedIds) -> Ints:
    """Where each id stands among others, int64 (V,); -1 = nowhere."""
    at_V = np.empty(ids.ids_V.size, dtype=np.int64)
    placement_kernels.find_sorted(ids.layout.starts_T1, ids.ids_V, among.layout.starts_T1, among.ids_V, at_V)
    return at_V


def _put(source: Layout, rows: Floats, from_K: Ints, target: Layout, to_K: Ints, out: Floats) -> None:
    """Copies rows at ascending places of one layout to as many of another."""
    placement_kernels.copy_rows(
        rows, source.starts_T1, from_K, out, target.starts_T1, to_K, target.catalog.dims_T
    )  # fmt: skip
