"""Kernels of the scaled formats: values by their row's step, as codes of few bits, packed; and back.

An encoded row is its step in 1 or 2 bytes (`scale_kernels`), then its codes of 2, 4 or 8 bits: within a byte
the first column has the lowest bits, and what is left of the last byte is zero. Each kernel does one thing in a plain
loop over many values, because only such loops become vector code at 16 values a row.
"""
# K = rows, D = embedding dim, P = D filled up to a multiple of 8, R = bytes of one encoded row, V = K * P values

from __future__ import annotations

import numpy as np

from shardkeep.base.array_kernels import float_of
from shardkeep.base.arrays import Bytes, Rows, UInt32s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.values.rounding_kernels import nearest
from shardkeep.compression.values.scale_kernels import NOT_FINITE

_ONE = np.float32(1.0)


@kernel("void(Array(float32, 2, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), float32[:,::1])")
def divide(rows_KD: Rows, steps_K: UInt32s, values_KP: Rows) -> None:
    """Values in steps; zeros for a row of zeros and for one that is not finite. Leaves what is beyond D."""
    for i in range(rows_KD.shape[0]):
        if steps_K[i] == 0 or steps_K[i] == np.uint32(NOT_FINITE):
            for c in range(rows_KD.shape[1]):
                values_KP[i, c] = 0.0
        else:
            inverse = np.float32(_ONE / float_of(steps_K[i]))
            for c in range(rows_KD.shape[1]):
                values_KP[i, c] = rows_KD[i, c] * inverse


@kernel("void(Array(float32, 1, 'C', readonly=True), int32, uint8, uint8[::1])")
def integers(values_V: Rows, levels: np.int32, mask: np.uint8, codes_V: Bytes) -> None:
    """Integers of -levels to levels, in two's complement of as many bits as the mask has."""
    low = np.int32(-levels)
    for v in range(values_V.size):
        codes_V[v] = np.uint8(min(max(nearest(values_V[v]), low), levels)) & mask


@kernel("void(uint8[:,::1], int64, int64, Array(uint32, 1, 'C', readonly=True), int64, uint8[:,::1])")
def pack(codes_KP: Bytes, columns: int, width: int, steps_K: UInt32s, scale_bytes: int, encoded_KR: Bytes) -> None:
    """Steps and the codes of so many columns, of `width` bits each, as encoded rows."""
    words_KP, whole = codes_KP.view(np.uint64), columns // 8
    gap = np.uint64(8 - width)
    two = np.uint64((1 << (2 * width)) - 1) * np.uint64(0x0001000100010001)
    four = np.uint64((1 << (4 * width)) - 1) * np.uint64(0x0000000100000001)
    for i in range(encoded_KR.shape[0]):
        step, row_R = steps_K[i], encoded_KR[i]
        if scale_bytes == 2:
            row_R[0] = np.uint8(step >> np.uint32(15))
            row_R[1] = np.uint8(step >> np.uint32(23))
        else:
            row_R[0] = np.uint8(step >> np.uint32(23))
        packed = row_R[scale_bytes:]  # a slice: its places need no test for numbers below 0
        if step == 0 or step == np.uint32(NOT_FINITE):
            for c in range(packed.size):
                packed[c] = 0
        elif width == 8:
            for b in range(whole):
                word = words_KP[i, b]
                for j in range(8):
                    packed[8 * b + j] = np.uint8(word >> np.uint64(8 * j))
            for c in range(8 * whole, columns):
                packed[c] = codes_KP[i, c]
        else:
            for b in range(words_KP.shape[1]):
                word, left = words_KP[i, b], columns - 8 * b
                if left < 8:
                    word &= (np.uint64(1) << np.uint64(8 * left)) - np.uint64(1)
                word = (word | (word >> gap)) & two
                word = (word | (word >> (gap + gap))) & four
                word = word | (word >> (np.uint64(4) * gap))
                for c in range(b * width, min(b * width + width, packed.size)):
                    packed[c] = np.uint8(word)
                    word = word >> np.uint64(8)


@kernel("void(Array(uint8, 2, 'C', readonly=True), int64, int64, uint8[:,::1])")
def unpack(encoded_KR: Bytes, width: int, scale_bytes: int, codes_KP: Bytes) -> None:
    """Codes of less than 8 bits, a byte each."""
    words_KP = codes_KP.view(np.uint64)
    gap = np.uint64(8 - width)
    one = np.uint64((1 << width) - 1) * np.uint64(0x0101010101010101)
    two = np.uint64((1 << (2 * width)) - 1) * np.uint64(0x0001000100010001)
    four = np.uint64((1 << (4 * width)) - 1) * np.uint64(0x0000000100000001)
    for i in range(encoded_KR.shape[0]):
        packed = encoded_KR[i, scale_bytes:]
        for b in range(words_KP.shape[1]):
            word = np.uint64(0)
            for c in range(b * width, min(b * width + width, packed.size)):
                word |= np.uint64(packed[c]) << np.uint64(8 * (c - b * width))
            word = (word | (word << (np.uint64(4) * gap))) & four
            word = (word | (word << (gap + gap))) & two
            words_KP[i, b] = (word | (word << gap)) & one


@kernel(
    "void(Array(uint8, 2, 'C', readonly=True), int64, int64, Array(float32, 1, 'C', readonly=True), float32[:,::1])"
)
def multiply_integers(codes_KP: Bytes, start: int, width: int, steps_K: Rows, rows_KD: Rows) -> None:
    """Each value is its row's step times its code in two's complement of `width` bits; the first is at `start`."""
    spare = np.int32(np.int32(32 - width) & np.int32(31))  # vectors need to know that it is below 32
    for i in range(rows_KD.shape[0]):
        step, codes = steps_K[i], codes_KP[i, start:]
        for c in range(rows_KD.shape[1]):
            level = np.int32(np.int32(np.int32(codes[c]) << spare) >> spare)
            rows_KD[i, c] = step * np.float32(level)
