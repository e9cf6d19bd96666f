"""Which rows of a step a worker requests from servers, and where the other rows come from.

Without a cache, all rows are requested. With one, rows with a valid lease come from the cache, and rows that another
step has already requested come from its reply. Knows no transport.
"""
# V = ids of all tables in a step, M = requested ids, D = embedding dim, T = tables

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.jagged import JaggedIds, JaggedLayout
from shardkeep.ps.placement import Split, split
from shardkeep.ps.placement_kernels import copy_rows, find_sorted


@dataclass(frozen=True, slots=True)
class Request:
    """A step's unique ids per table, split by server. Made ahead of the pull; the push needs it again."""

    ids: JaggedIds
    split: Split


@dataclass(slots=True, eq=False)
class Fetch:
    """A step's ids, and the ids that are requested from servers."""

    step: int
    request: Request
    missing: Request
    """The ids that are sent to servers."""
    flat: Floats | None = None
    """Rows of the request, with the cached ones filled in; None = all rows are requested."""
    places_M: Ints | None = None
    """The position of each requested id in the request; None = they are the same."""
    borrowed: list[tuple[Fetch, Ints, Ints]] = field(default_factory=list)
    """(another fetch, positions in it, positions here) of rows whose reply is in flight."""
    receive: Callable[[], object] | None = None
    """Waits for the reply; None = it is here, or nobody borrows from it."""
    answer: Floats | None = None
    """The rows of the reply, once received, for fetches that borrow them."""


class Cache:
    """Keeps rows for `lease` steps, so that they are not pulled again. For one worker; not thread safe."""

    def __init__(self, memory: RowMemory, *, lease: int, window: int, num_servers: int) -> None:
        self._memory = memory
        self._lease = lease
        self._num_servers = num_servers
        self._under_way: deque[Fetch] = deque(maxlen=window)
        self.hits = self.misses = 0
        """Rows that came from the cache, and rows that were requested."""

    def fetch(self, step: int, request: Request, receive: Callable[[], object]) -> Fetch:
        """Finds the rows of a request that servers must send. `receive`: as of `Fetch`."""
        ids, layout = request.ids, request.ids.layout
        flat = np.empty(layout.num_values, dtype=np.float32)
        known_V = self._memory.lookup(step, ids, flat)
        borrowed = []
        for other in self._under_way:
            if other.answer is not None or step - other.step > self._lease:
                continue
            at_V = find(ids, other.missing.ids)
            places = np.flatnonzero((at_V >= 0) & ~known_V)
            if places.size:
                borrowed.append((other, at_V[places], places))
                known_V[places] = True
        places_M = np.flatnonzero(~known_V)
        self.hits += ids.ids_V.size - places_M.size
        self.misses += places_M.size
        counts_T = np.diff(np.searchsorted(places_M, layout.starts_T1))
        lacking = JaggedIds(JaggedLayout.of_counts(layout.catalog, counts_T), ids.ids_V[places_M], ids.names)
        missing = Request(lacking, split(lacking, self._num_servers))
        fetch = Fetch(step, request, missing, flat, places_M, borrowed, receive)
        self._under_way.append(fetch)
        return fetch

    def fill(self, fetch: Fetch, answer: Floats) -> Floats:
        """Returns all rows of the request: those of the reply, the cached ones and the borrowed ones."""
        flat, layout = fetch.flat, fetch.request.ids.layout
        assert flat is not None and fetch.places_M is not None
        to_T1, dims_T, all_M = layout.starts_T1, layout.catalog.dims_T, np.arange(fetch.places_M.size)
        copy_rows(answer, fetch.missing.ids.layout.starts_T1, all_M, flat, to_T1, fetch.places_M, dims_T)
        for other, from_K, to_K in fetch.borrowed:
            if other.receive is not None:  # results are taken in another order than the pulls were sent
                other.receive()
            assert other.answer is not None
            copy_rows(other.answer, other.missing.ids.layout.starts_T1, from_K, flat, to_T1, to_K, dims_T)
        fetch.borrowed, fetch.receive = [], None
        fetch.answer = answer
        self._memory.store(fetch.step, fetch.missing.ids, answer)
        return flat

    def forget(self) -> None:
        """Forgets pulls in flight: their replies will not come."""
        self._under_way.clear()


def find(ids: JaggedIds, among: JaggedIds) -> Ints:
    """The position of each id among others, int64 (V,); -1 = not there."""
    at_V = np.empty(ids.ids_V.size, dtype=np.int64)
    find_sorted(ids.layout.starts_T1, ids.ids_V, among.layout.starts_T1, among.ids_V, at_V)
    return at_V
