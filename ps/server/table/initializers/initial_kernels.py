"""Kernels of initial values."""
# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np
from numba.core.types import int64, void

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix
from shardkeep.ps.server.table.descriptor_kernels import FLOATS, INTS, ROWS, START, InitialValues

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""Numbers of the initializers."""

_LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_UNIT24 = 2.0**-24
_UNIT32 = 2.0**-32


@kernel(void(START, int64, int64, FLOATS))
def initial_values(start: InitialValues, id_: int, dim: int, out: Rows) -> None:
    """Initial weights of a row into out[:dim]: one 64-bit hash of (table key, id, pair) per two columns.

    `first`, `second` of `start`: the value of CONSTANT; low and high of UNIFORM, which has 24 random bits; mean and
    standard deviation of NORMAL, by Box and Muller (1958). All arithmetic is in float64, so that a value is rounded
    once. An unknown initializer leaves `out` as it is."""
    initializer, first = start.initializer, start.first
    if initializer == CONSTANT:
        for d in range(dim):
            out[d] = first
        return
    low, deviation = np.float64(first), np.float64(start.second)
    width = deviation - low
    base = mix(start.key ^ mix(np.uint64(id_) + GOLDEN))
    for pair in range((dim + 1) // 2):
        bits = mix(base + np.uint64(pair + 1) * GOLDEN)
        if initializer == UNIFORM:
            one = low + np.float64(bits >> np.uint64(40)) * _UNIT24 * width
            other = low + np.float64((bits >> np.uint64(8)) & np.uint64(0xFFFFFF)) * _UNIT24 * width
        elif initializer == NORMAL:
            radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _32) + 1.0) * _UNIT32)) * deviation
            angle = 2.0 * np.pi * (np.float64(bits & _LOW32) * _UNIT32)
            one, other = radius * np.cos(angle), radius * np.sin(angle)
            if low != 0.0:  # -0.0 + 0.0 would be 0.0
                one, other = one + low, other + low
        else:
            return
        out[2 * pair] = np.float32(one)
        if 2 * pair + 1 < dim:
            out[2 * pair + 1] = np.float32(other)


@kernel(void(START, INTS, ROWS))
def initial_rows(start: InitialValues, ids_U: Ids, rows_UD: Rows) -> None:
    """Initial weights of ids."""
    for i in range(ids_U.size):
        initial_values(start, ids_U[i], rows_UD.shape[1], rows_UD[i])
