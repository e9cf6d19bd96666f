"""Kernels of rounding: keys of rows, the random numbers that they give, and the integer nearest to a float32.

What works on single numbers has no branches, so that the loops that call it become vector code.
"""
# K = rows, C = columns

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.array_kernels import bits_of
from shardkeep.base.arrays import UInt32s, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix

_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: floats around it are 1 apart, so adding it rounds to the nearest, even
_MAGIC_BITS = np.int32(0x4B400000)


@kernel("void(uint64, uint64, int64, Array(int64, 1, 'C', readonly=True), uint64[::1])")
def row_keys(
    seed: np.uint64, table_key: np.uint64, step: int, ids_K: npt.NDArray[np.int64], keys_K: npt.NDArray[np.uint64]
) -> None:
    """Keys of the rows with these ids: a chain of mixes, each of what was mixed before and the next number."""
    common = mix(mix(mix(seed + GOLDEN) ^ table_key) + GOLDEN ^ np.uint64(step))
    for i in range(ids_K.size):
        keys_K[i] = mix(mix(common + GOLDEN * np.uint64(ids_K[i])) ^ common)


@kernel("uint32(uint32, uint32, uint32)")
def random_bits(low: np.uint32, high: np.uint32, column: np.uint32) -> np.uint32:
    """32 random bits of one value, from the two halves of its row's key: lowbias32, a mix of 32 bits (Wellons, "Hash
    function prospector"), of the upper half and of what a first round has made of the lower one and the column."""
    x = np.uint32(low + np.uint32(column * np.uint32(0x9E3779B9)))
    x = np.uint32(np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x735A2D97)) + high)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97))
    return np.uint32(x ^ (x >> np.uint32(15)))


@kernel("void(Array(uint64, 1, 'C', readonly=True), uint32[:,::1])")
def draw(keys_K: UInt64s, bits_KC: UInt32s) -> None:
    """The random bits of each column of the rows with these keys."""
    for i in range(keys_K.size):
        low, high = np.uint32(keys_K[i] & np.uint64(0xFFFFFFFF)), np.uint32(keys_K[i] >> np.uint64(32))
        for c in range(bits_KC.shape[1]):
            bits_KC[i, c] = random_bits(low, high, np.uint32(c))


@kernel("int32(float32)")
def nearest(value: np.float32) -> np.int32:
    """The nearest integer, ties to the even one; for |value| below 2**22."""
    return np.int32(np.int32(bits_of(np.float32(value + _MAGIC))) - _MAGIC_BITS)
