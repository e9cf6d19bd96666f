"""Which id lives on which server: pure functions of the id and the number of servers.

An id falls into one of 4096 buckets by a mix of its bits; servers own equal, contiguous ranges of
buckets, so another number of servers moves whole buckets. Tables share the rule.
"""
# U = unique ids

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.ps import placement_kernels

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

BUCKET_BITS = placement_kernels.BUCKET_BITS
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

    def of_server(self, array_U: npt.NDArray[T], server: int) -> npt.NDArray[T]:
        """The part of an array (U, ...) that belongs to one server, in the order of `positions`; a view if it can."""
        positions = self.positions(server)
        return array_U[positions] if isinstance(positions, slice) else array_U.take(positions, axis=0)

    def put_rows(self, server: int, rows_KD: Rows, out_UD: Rows) -> None:
        """Copies one server's rows to their places among all, both float32."""
        positions = self.positions(server)
        if isinstance(positions, slice):
            out_UD[positions] = rows_KD
        else:  # numpy's own indexing of rows is six times slower
            placement_kernels.scatter(_plain(rows_KD), positions, out_UD)


def bucket_of(ids_U: Ids) -> Ids:
    """The placement bucket of each id, in [0, BUCKETS): the top bits of the id's splitmix64 finalizer."""
    buckets_U = np.empty(ids_U.size, dtype=np.int64)
    placement_kernels.find_buckets(_plain(ids_U), buckets_U)
    return buckets_U


def server_of(ids_U: Ids, num_servers: int) -> Ids:
    """The server of each id, in [0, num_servers)."""
    return bucket_of(ids_U) * num_servers >> BUCKET_BITS


def split(ids_U: Ids, num_servers: int) -> Split:
    """Splits ids among servers; keeps their order within each server."""
    if num_servers == 1:
        return Split(None, (0, ids_U.size))
    order_U, starts = np.empty(ids_U.size, dtype=np.int64), np.zeros(num_servers + 1, dtype=np.int64)
    placement_kernels.group(_plain(ids_U), num_servers, order_U, starts)
    return Split(order_U, tuple(starts.tolist()))


def _plain(array: npt.NDArray[T]) -> npt.NDArray[T]:
    """The array itself where kernels can take it, else a copy: contiguous, aligned, writable."""
    return array if array.flags.carray else array.copy()
