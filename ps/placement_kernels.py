"""Kernels of placement: which server an id belongs to, and rows moved between a table's order and its servers'."""
# U = unique ids, K = rows of one server, D = embedding dim

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.kernels import kernel
from shardkeep.ps.shard.index_kernels import mix

Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]

BUCKET_BITS = 12
_SHIFT = np.uint64(64 - BUCKET_BITS)


@kernel("int64(int64)")
def bucket(id_: int) -> int:
    """The placement bucket of an id: the top bits of the id's splitmix64 finalizer."""
    found: int = np.int64(mix(np.uint64(id_)) >> _SHIFT)  # type: ignore[assignment]
    return found


@kernel("void(int64[::1], int64[::1])")
def find_buckets(ids_U: Integers, buckets_U: Integers) -> None:
    for i in range(ids_U.size):
        buckets_U[i] = bucket(ids_U[i])


@kernel("void(int64[::1], int64, int64[::1], int64[::1])")
def group(ids_U: Integers, num_servers: int, order_U: Integers, starts: Integers) -> None:
    """Counting sort of positions by server, ascending in each; `starts` (num_servers + 1) comes as zeros."""
    for i in range(ids_U.size):
        starts[(bucket(ids_U[i]) * num_servers >> BUCKET_BITS) + 1] += 1
    for server in range(num_servers):
        starts[server + 1] += starts[server]
    place = starts.copy()
    for i in range(ids_U.size):
        server = bucket(ids_U[i]) * num_servers >> BUCKET_BITS
        order_U[place[server]] = i
        place[server] += 1


@kernel("void(float32[:,::1], int64[::1], float32[:,::1])")
def scatter(rows_KD: Rows, positions_K: Integers, out_UD: Rows) -> None:
    """Row k to position `positions_K[k]`."""
    for k in range(positions_K.size):
        for d in range(out_UD.shape[1]):
            out_UD[positions_K[k], d] = rows_KD[k, d]
