"""Which id lives on which server: pure functions of the id and the number of servers.

An id falls into one of 4096 buckets by a mix of its bits; servers own equal, contiguous ranges of
buckets, so another number of servers moves whole buckets. Tables share the rule.
"""
# U = ids, V = ids of all tables, K = ids of one server, T = tables

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes, Ids, Rows
from shardkeep.base.contiguous import for_kernels
from shardkeep.ps import placement_kernels
from shardkeep.ps.jagged import JaggedIds, JaggedLayout

BUCKET_BITS = placement_kernels.BUCKET_BITS
BUCKETS = 1 << BUCKET_BITS


@dataclass(frozen=True, slots=True)
class Split:
    """Jagged ids, split among servers: server s holds positions `order[starts[s]:starts[s + 1]]`."""

    order_V: Ids | None
    """Positions grouped by server, in each group ascending; None = all on one server, as they are."""
    starts: tuple[int, ...]
    counts_ST: Ids
    """How many ids of each table a server holds."""

    def positions(self, server: int) -> Ids | None:
        """The positions of one server's ids among the jagged ids; None = all."""
        return None if self.order_V is None else self.order_V[self.starts[server] : self.starts[server + 1]]

    def count(self, server: int) -> int:
        return self.starts[server + 1] - self.starts[server]

    def ids_of(self, server: int, ids_V: Ids) -> Ids:
        """The ids of one server (K,), table after table; a view if it can."""
        positions_K = self.positions(server)
        return ids_V if positions_K is None else ids_V.take(positions_K)

    def take_rows(self, server: int, layout: JaggedLayout, encoded: Bytes, widths_T: Ids, out: Bytes) -> None:
        """Copies one server's rows out of all tables' encoded ones, of `widths` bytes each."""
        positions_K = self.positions(server)
        if positions_K is None:
            out[:] = encoded
            return
        if not (widths_T & 3).any() and encoded.flags.aligned and not (encoded.ctypes.data | out.ctypes.data) & 3:
            encoded, out, widths_T = encoded.view(np.uint32), out.view(np.uint32), widths_T >> 2
        placement_kernels.take_rows(encoded, positions_K, self.counts_ST[server], layout.starts_T1, widths_T, out)

    def put_rows(self, server: int, layout: JaggedLayout, rows: Rows, out: Rows) -> None:
        """Copies one server's rows, flat float32, to their places among all tables'."""
        positions_K = self.positions(server)
        if positions_K is None:
            out[:] = rows
            return
        dims_T = layout.catalog.dims_T
        placement_kernels.put_rows(rows, positions_K, self.counts_ST[server], layout.starts_T1, dims_T, out)


def bucket_of(ids_U: Ids) -> Ids:
    """The placement bucket of each id, in [0, BUCKETS): the top bits of the id's splitmix64 finalizer."""
    return (keys_of(ids_U) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def keys_of(ids_U: Ids) -> npt.NDArray[np.uint64]:
    """The placement key of each id: `mix(id)`, whose top BUCKET_BITS are the bucket. Distinct ids have distinct keys.

    In numpy, bit for bit what the kernel `mix` computes, so that readers of files need no kernel."""
    keys_U = ids_U.astype(np.int64).view(np.uint64)
    keys_U ^= keys_U >> np.uint64(30)
    keys_U *= np.uint64(0xBF58476D1CE4E5B9)
    keys_U ^= keys_U >> np.uint64(27)
    keys_U *= np.uint64(0x94D049BB133111EB)
    keys_U ^= keys_U >> np.uint64(31)
    return keys_U


def server_of(ids_U: Ids, num_servers: int) -> Ids:
    """The server of each id, in [0, num_servers)."""
    return bucket_of(ids_U) * num_servers >> BUCKET_BITS


def buckets_of(server: int, num_servers: int) -> tuple[int, int]:
    """The buckets [first, end) of a server."""
    return -(-server * BUCKETS // num_servers), -(-(server + 1) * BUCKETS // num_servers)


def split(ids: JaggedIds, num_servers: int) -> Split:
    """Splits ids among servers; keeps their order within each server."""
    ids_V, starts_T1 = ids.ids_V, ids.layout.starts_T1
    if num_servers == 1:
        return Split(None, (0, ids_V.size), (starts_T1[1:] - starts_T1[:-1]).reshape(1, -1))
    order_V, starts = np.empty(ids_V.size, dtype=np.int64), np.zeros(num_servers + 1, dtype=np.int64)
    counts_ST = np.zeros((num_servers, starts_T1.size - 1), dtype=np.int64)
    placement_kernels.group(for_kernels(ids_V, np.int64), starts_T1, num_servers, order_V, starts, counts_ST)
    return Split(order_V, tuple(starts.tolist()), counts_ST)
