"""Kernels of row scales: the step of a row's levels from its largest magnitude, and a step as one or two bytes.

A step is a float32 whose low bits are zero: of one byte the exponent alone is kept, of two the exponent and eight
bits of the mantissa (the sign is always +). So there is a code for every size of row. Exponent 255 marks a row that is
not finite, code 0 a row of zeros.
"""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import numpy as np

from shardkeep.base.array_kernels import bits_of, float_of
from shardkeep.base.arrays import Bytes, Rows, UInt32s
from shardkeep.base.compiling.kernels import kernel

NOT_FINITE = 0x7FC00000
"""The step of a row with an infinity or a NaN: a NaN itself."""
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LEAST = np.int64(0x00800000)  # 2**-126: the inverse of anything much smaller is infinite


@kernel("uint32(uint32, float32, int64, int64)")
def step_above(largest: np.uint32, levels: np.float32, limit: int, scale_bytes: int) -> np.uint32:
    """The step of a row whose largest magnitude has these bits."""
    if largest == 0:
        return np.uint32(0)
    if largest >= _INFINITY:
        return np.uint32(NOT_FINITE)
    if scale_bytes == 1:
        of_levels = np.int64(bits_of(levels))
        mantissa = of_levels & 0x7FFFFF
        bits = ((np.int64(largest) - mantissa + 0x7FFFFF) & ~0x7FFFFF) - (of_levels - mantissa) + 0x3F800000
    else:
        bits = (np.int64(bits_of(np.float32(float_of(largest) / levels))) + 0x7FFF) & ~0x7FFF
        if np.float64(float_of(np.uint32(bits))) * levels < float_of(largest):  # the division had rounded down
            bits += 0x8000
    return np.uint32(min(max(np.int64(bits), _LEAST), np.int64(limit)))


@kernel("void(Array(uint32, 2, 'C', readonly=True), float32, int64, int64, uint32[::1])")
def steps_above(bits_KD: UInt32s, levels: np.float32, limit: int, scale_bytes: int, steps_K: UInt32s) -> None:
    """Bits of each row's step: the smallest that has a code and `levels` times which is at least the row's largest
    magnitude, so that nothing clips. Never below 2**-126, nor above `limit`, where the largest values do clip."""
    for i in range(bits_KD.shape[0]):
        top = np.uint32(0)
        for c in range(bits_KD.shape[1]):  # no eights here: they end in branches, which cost 20 ns a row
            top = max(top, np.uint32(bits_KD[i, c] & _MAGNITUDE))
        steps_K[i] = step_above(top, levels, limit, scale_bytes)


@kernel("void(Array(uint8, 2, 'C', readonly=True), int64, float32[::1])")
def read_steps(encoded_KR: Bytes, scale_bytes: int, steps_K: Rows) -> None:
    """The steps in front of encoded rows; NaN for a row that was not finite."""
    for i in range(encoded_KR.shape[0]):
        if scale_bytes == 1:
            bits = np.uint32(np.uint32(encoded_KR[i, 0]) << np.uint32(23))
        else:
            code = np.uint32(encoded_KR[i, 0]) | np.uint32(np.uint32(encoded_KR[i, 1]) << np.uint32(8))
            bits = np.uint32(np.uint32(code) << np.uint32(15))
        bits = np.uint32(bits & _MAGNITUDE)
        steps_K[i] = float_of(np.uint32(NOT_FINITE) if bits >= _INFINITY else bits)
