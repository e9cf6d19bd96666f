"""Initial values of rows: a counter-based hash of (seed, table name, id, column). Nothing is stored."""

# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np
import xxhash

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.server.table.descriptor_kernels import START_DTYPE
from shardkeep.ps.server.table.initializers.config import INITIALIZERS, InitConfig
from shardkeep.ps.server.table.initializers.initial_kernels import initial_rows

_MASK = (1 << 64) - 1


def table_key(seed: int, name: str) -> np.uint64:
    """The key of a table's random numbers: splitmix64(seed ^ xxh3_64(name))."""
    return np.uint64(mix(np.uint64((seed & _MASK) ^ xxhash.xxh3_64_intdigest(name.encode("utf-8")))))


class Initial:
    """The initial values of one table, the same on every server and in every run with the same seed."""

    def __init__(self, init: InitConfig, *, seed: int, name: str) -> None:
        self.start = np.zeros(1, dtype=START_DTYPE)[0]
        """As kernels take it."""
        self.start["key"], self.start["initializer"] = table_key(seed, name), INITIALIZERS[init.name].load()
        self.start["first"], self.start["second"] = init.parameters

    def rows(self, ids_U: Ids, dim: int) -> Rows:
        """The initial weights of ids, float32 (U, dim)."""
        rows_UD = np.empty((ids_U.size, dim), dtype=np.float32)
        initial_rows(self.start, for_kernels(ids_U, np.int64), rows_UD)
        return rows_UD
