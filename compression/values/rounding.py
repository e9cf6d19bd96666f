"""What rounding needs to know: keys of rows, from which their values' random numbers follow, and the shape of a float.

No state: two who have the same seed make the same numbers.
"""
# K = rows, T = tables, V = rows of all tables

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import UInt64s


def table_key(name: str) -> int:
    """A number of 64 bits for a table's name, the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def row_keys(seed: int, table_key: int, ids_K: npt.NDArray[np.int64], step: int) -> UInt64s:
    """Keys of rows in a step, uint64 (K,): each a hash of these four numbers alone, not of a row's place among others.

    Args:
        seed: Any integer; its lowest 64 bits count.
        table_key: Of `table_key`.
        ids_K: Row ids, C-contiguous.
        step: From 0 on."""
    from shardkeep.compression.values import (
        rounding_kernels,  # only here: most jobs round to the nearest and need not load it
    )

    keys_K = np.empty(ids_K.size, dtype=np.uint64)
    mask = 2**64 - 1
    rounding_kernels.row_keys(np.uint64(seed & mask), np.uint64(table_key & mask), step, ids_K, keys_K)
    return keys_K


class WorkerKeys:
    """Keys of the rows that one worker sends. Each worker has its own, or what they add to one row would be rounded
    alike, and their errors would not cancel."""

    def __init__(self, seed: int, rank: int, tables: Sequence[str]) -> None:
        self._seed = seed + (rank << 40)
        self._tables = [table_key(name) for name in tables]

    def of_step(self, step: int, starts_T1: npt.NDArray[np.int64], ids_V: npt.NDArray[np.int64]) -> UInt64s:
        """Keys of a step's rows, uint64 (V,); table t has those from starts[t] up to starts[t + 1]."""
        bounds = pairwise(starts_T1.tolist())
        parts = [row_keys(self._seed, key, ids_V[a:b], step) for key, (a, b) in zip(self._tables, bounds, strict=True)]
        return np.concatenate(parts)


def float_shape(mantissa: int, bias: int) -> npt.NDArray[np.uint32]:
    """A float format of fewer bits than float32, as `rounding_kernels.small_float_stochastic` wants it, uint32 (4,):
    `mantissa` bits after the point, exponents from 1 - `bias` on, subnormals below."""
    least, subnormal = 1 - bias, 1 - bias - mantissa
    powers = np.exp2(np.array([least, 21 - subnormal], dtype=np.float32)).view(np.uint32)
    return np.array([23 - mantissa, (127 - bias) << mantissa, *powers], dtype=np.uint32)
