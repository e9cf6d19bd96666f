"""Initial values of rows: a counter-based hash of (seed, table name, id, column). Nothing is stored."""

# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np
import xxhash

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.init_config import InitConfig
from shardkeep.ps.shard.table.row_kernels import CONSTANT, NORMAL, UNIFORM, gather

INITIALIZERS: dict[str, int] = {
    "zeros": CONSTANT,
    "constant": CONSTANT,
    "uniform": UNIFORM,
    "normal": NORMAL,
    "file": UNIFORM,
}
"""From the config's name to the number that the kernel `initial_values` knows."""

_NOWHERE = np.zeros(1, dtype=np.int64)
_MASK = (1 << 64) - 1


def table_key(seed: int, name: str) -> np.uint64:
    """The key of a table's random numbers: splitmix64(seed ^ xxh3_64(name))."""
    return np.uint64(mix(np.uint64((seed & _MASK) ^ xxhash.xxh3_64_intdigest(name.encode("utf-8")))))


class Initial:
    """The initial values of one table, the same on every server and in every run with the same seed."""

    def __init__(self, init: InitConfig, *, seed: int, name: str) -> None:
        self.key = table_key(seed, name)
        self.initializer = INITIALIZERS[init.name]
        self.first, self.second = map(np.float32, init.parameters)
        """The parameters of the distribution, as the kernel takes them."""

    def rows(self, ids_U: Ids, dim: int) -> Rows:
        """The initial weights of ids, float32 (U, dim)."""
        rows_UD, nowhere_U = np.empty((ids_U.size, dim), dtype=np.float32), np.full(ids_U.size, -1)
        law = self.key, self.initializer, self.first, self.second
        gather(for_kernels(ids_U, np.int64), nowhere_U, _NOWHERE, 0, 0, *law, rows_UD)
        return rows_UD
