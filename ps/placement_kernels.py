"""Kernels of placement: which server an id belongs to, and rows moved between a table's order and its servers'."""
# V = ids of all tables, K = ids of one server, T = tables

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix

Table = npt.NDArray[np.int64]
Words = npt.NDArray[np.generic]

BUCKET_BITS = 12
_SHIFT = np.uint64(64 - BUCKET_BITS)


@kernel("int64(int64)")
def bucket(id_: int) -> int:
    """The placement bucket of an id: the top bits of the id's splitmix64 finalizer."""
    number: int = np.int64(mix(np.uint64(id_)) >> _SHIFT)  # type: ignore[assignment]
    return number


@kernel("void(int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[:,::1])")
def group(ids_V: Ints, starts_T1: Ints, num_servers: int, order_V: Ints, starts: Ints, counts_ST: Table) -> None:
    """Counting sort of positions by server, ascending in each; `starts` (num_servers + 1) and the ids of each server
    and table come as zeros."""
    for t in range(starts_T1.size - 1):
        for i in range(starts_T1[t], starts_T1[t + 1]):
            counts_ST[bucket(ids_V[i]) * num_servers >> BUCKET_BITS, t] += 1
    for server in range(num_servers):
        starts[server + 1] = starts[server] + counts_ST[server].sum()
    place = starts.copy()
    for i in range(ids_V.size):
        server = bucket(ids_V[i]) * num_servers >> BUCKET_BITS
        order_V[place[server]] = i
        place[server] += 1


@kernel(
    *(
        f"void(Array({t}, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1], int64[::1], {t}[::1])"
        for t in ("uint32", "uint8")
    )
)
def take_rows(words: Words, positions_K: Ints, counts_T: Ints, starts_T1: Ints, widths_T: Ints, out: Words) -> None:
    """Rows of one server, in the order of their positions, out of all tables' rows. Table t has rows of `widths[t]`
    words, and `counts[t]` of the positions."""
    k = to = table_at = 0
    for t in range(counts_T.size):
        width = widths_T[t]
        for _ in range(counts_T[t]):
            at = table_at + (positions_K[k] - starts_T1[t]) * width
            for w in range(width):
                out[to + w] = words[at + w]
            to += width
            k += 1
        table_at += (starts_T1[t + 1] - starts_T1[t]) * width


@kernel("void(Array(float32, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1], int64[::1], float32[::1])")
def put_rows(rows: Rows, positions_K: Ints, counts_T: Ints, starts_T1: Ints, dims_T: Ints, out: Rows) -> None:
    """The transpose of `take_rows`: rows of one server to their positions among all tables' rows."""
    k = at = table_at = 0
    for t in range(counts_T.size):
        dim = dims_T[t]
        for _ in range(counts_T[t]):
            to = table_at + (positions_K[k] - starts_T1[t]) * dim
            for d in range(dim):
                out[to + d] = rows[at + d]
            at += dim
            k += 1
        table_at += (starts_T1[t + 1] - starts_T1[t]) * dim


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def find_sorted(starts_T1: Ints, ids_V: Ints, among_T1: Ints, among_N: Ints, at_V: Ints) -> None:
    """Where each id stands among others of the same table, -1 = nowhere; each table's ids rise on both sides."""
    for t in range(starts_T1.size - 1):
        n, end = among_T1[t], among_T1[t + 1]
        for i in range(starts_T1[t], starts_T1[t + 1]):
            while n < end and among_N[n] < ids_V[i]:
                n += 1
            at_V[i] = n if n < end and among_N[n] == ids_V[i] else -1


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64[::1], int64[::1], float32[::1], int64[::1], int64[::1],"
    " int64[::1])"
)
def copy_rows(rows: Rows, starts_T1: Ints, from_K: Ints, out: Rows, to_T1: Ints, to_K: Ints, dims_T: Ints) -> None:
    """Row `from_K[k]` of one layout to place `to_K[k]` of another, both ascending; a row stays in its table."""
    k = table_at = table_to = 0
    for t in range(dims_T.size):
        dim = dims_T[t]
        while k < from_K.size and from_K[k] < starts_T1[t + 1]:
            at = table_at + (from_K[k] - starts_T1[t]) * dim
            to = table_to + (to_K[k] - to_T1[t]) * dim
            for d in range(dim):
                out[to + d] = rows[at + d]
            k += 1
        table_at += (starts_T1[t + 1] - starts_T1[t]) * dim
        table_to += (to_T1[t + 1] - to_T1[t]) * dim
