"""Draws: random numbers for rounding, keyed by what is rounded, so that a step that is repeated has the same bits."""
# S = sections, K = rows, C = columns

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats, Ids, Ints, UInt32s, UInt64s
from shardkeep.base.contiguous import for_kernels


class Draws:
    """Random numbers for the rows of one call, a function of (seed, table, sender, step, id, column) alone.

    They do not depend on the number of servers or on the other rows. Nothing is computed until it is asked for."""

    def __init__(self, keys_S: UInt64s, rows_S: Ints, ids_K: Ids, *, step: int, sender: int = 0) -> None:
        """`keys_S`: of the table of each section, from the seed and its name. `sender`: 0 = servers, rank + 1 = a
        worker, so that workers round one row independently."""
        self._sections = keys_S, rows_S, ids_K
        self._step, self._sender = step, sender

    def bits(self, columns: int) -> UInt32s:
        """32 random bits for each value, uint32 (K, columns). The same in each call."""
        from shardkeep.compression.values.rounding_kernels import draw, row_keys  # most jobs draw nothing

        keys_S, rows_S, ids_K = self._sections
        keys_K, ids_K, at = np.empty(ids_K.size, dtype=np.uint64), for_kernels(ids_K, np.int64), 0
        for key, rows in zip(keys_S, rows_S.tolist(), strict=True):  # 0 is the rounding of stored rows
            part = slice(at, at := at + rows)
            row_keys(key, np.uint64(1 + self._sender), self._step, ids_K[part], keys_K[part])
        bits_KC = np.empty((keys_K.size, columns), dtype=np.uint32)
        draw(keys_K, bits_KC)
        return bits_KC

    def uniform(self, columns: int) -> Floats:
        """Numbers of 24 bits in [0, 1), float32 (K, columns), from `bits`."""
        return (self.bits(columns) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
