"""Which id lives on which server: pure functions of the id and the number of servers.

An id falls into one of 4096 buckets by a mix of its bits; servers own equal, contiguous ranges of
buckets, so another number of servers moves whole buckets. Tables share the rule.
"""
# U = unique ids

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS


@dataclass(frozen=True, slots=True)
class Split:
    """A list of ids, split among servers: server s holds positions `order[starts[s]:starts[s + 1]]`."""

    order_U: Ids | None
    """Positions grouped by server, in each group ascending; None = all on one server, as they are."""
    starts: tuple[int, ...]

    def positions(self, server: int) -> Ids | slice:
        """The positions of one server's ids in the split list."""
        if self.order_U is None:
            return slice(self.starts[server], self.starts[server + 1])
        return self.order_U[self.starts[server] : self.starts[server + 1]]

    def count(self, server: int) -> int:
        return self.starts[server + 1] - self.starts[server]


def bucket_of(ids_U: Ids) -> npt.NDArray[np.uint64]:
    """The placement bucket of each id, in [0, BUCKETS): the top bits of the id's splitmix64 finalizer."""
    x = ids_U.view(np.uint64).copy()
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x >> np.uint64(64 - BUCKET_BITS)


def server_of(ids_U: Ids, num_servers: int) -> npt.NDArray[np.uint16]:
    """The server of each id, in [0, num_servers)."""
    return (bucket_of(ids_U) * np.uint64(num_servers) >> np.uint64(BUCKET_BITS)).astype(np.uint16)


def split(ids_U: Ids, num_servers: int) -> Split:
    """Splits ids among servers; keeps their order within each server."""
    if num_servers == 1:
        return Split(None, (0, ids_U.size))
    servers = server_of(ids_U, num_servers)
    order = np.argsort(servers, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(servers, minlength=num_servers))])
    return Split(order, tuple(starts.tolist()))
