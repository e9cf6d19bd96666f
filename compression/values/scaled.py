"""The codecs with a row scale: integers of 8, 4 and 2 bits, rounded to the nearest, ties to even.

A row is a step and a code for each value; it decodes to step * level of the code. Rules that hold for all:

- The step is the smallest with a code at which the row's largest magnitude is within the levels: nothing clips. It
  never falls below 2**-126 (so values below 2**-127 may become zero) and stops where the largest level is
  still a finite float32: magnitudes beyond that clip to it (int2: above 1.7e38; int4: 2.97e38).
- A row of zeros decodes to +0. A row with a NaN or an infinity decodes to a row of NaN.
- A step takes 1 byte, a power of two (`pow2`), or 2 bytes: the exponent and 8 bits of the mantissa of a float32
  (`fp16`, though with another exponent than IEEE's, for a gradient's step may be far below 6e-8).

Stateless; knows no error feedback.
"""
# K = rows, D = embedding dim, P = D filled up to a multiple of 8, R = bytes of one encoded row, B = rows of a block

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Rows, UInt32s
from shardkeep.compression.values import scale_kernels, scaled_kernels as kernels
from shardkeep.compression.values.codec import RowCodec, check_rows
from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.registry import Scale

BLOCK = 65536
"""Values that are encoded at a time: what is in between stays in a core's own cache."""
_FLOAT32_MOST = float(np.finfo(np.float32).max)


@dataclass(slots=True, eq=False)
class ScaledCodec(RowCodec):
    """A format of one step per row and `width` bits per value: an integer, -127 to 127, -7 to 7 or -1 to 1."""

    width: int
    """Bits of a code: 2, 4 or 8."""
    scale: Scale

    @property
    def top(self) -> int:
        """The level that the largest magnitude of a row may reach."""
        return (1 << self.width - 1) - 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row that are its scale."""
        return 1 if self.scale == "pow2" else 2

    def row_bytes(self, dim: int) -> int:
        """D codes, rounded up to bytes, and the scale."""
        return self.scale_bytes + (dim * self.width + 7) // 8

    def parts(self, packet: Bytes, num_rows: int, dim: int) -> Mapping[str, int]:
        return {"scales": num_rows * self.scale_bytes}

    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        """Fresh uint8 (K, R)."""
        check_rows(rows_KD)
        num_rows, dim = rows_KD.shape
        encoded = np.empty((num_rows, self.row_bytes(dim)), dtype=np.uint8)
        padded = dim + -dim % 8
        size = min(num_rows, max(1, BLOCK // padded))
        values_BP = np.zeros((size, padded), dtype=np.float32)
        codes_BP = np.empty((size, padded), dtype=np.uint8)
        for start in range(0, num_rows, max(size, 1)):
            rows_BD = rows_KD[start : start + size]
            count = len(rows_BD)
            steps_B = self._steps(rows_BD)
            kernels.divide(rows_BD, steps_B, values_BP[:count])
            values_V, codes_V = values_BP[:count].reshape(-1), codes_BP[:count].reshape(-1)
            kernels.integers(values_V, np.int32(self.top), np.uint8((1 << self.width) - 1), codes_V)
            kernels.pack(codes_BP[:count], dim, self.width, steps_B, self.scale_bytes, encoded[start : start + size])
        return encoded

    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        """Fresh float32 (K, D)."""
        rows_KD = np.empty((len(encoded_KR), dim), dtype=np.float32)
        steps_K = np.empty(len(encoded_KR), dtype=np.float32)
        scale_kernels.read_steps(encoded_KR, self.scale_bytes, steps_K)
        codes, start = encoded_KR, self.scale_bytes
        if self.width < 8:
            codes, start = np.empty((len(encoded_KR), dim + -dim % 8), dtype=np.uint8), 0
            kernels.unpack(encoded_KR, self.width, self.scale_bytes, codes)
        kernels.multiply_integers(codes, start, self.width, steps_K, rows_KD)
        return rows_KD

    def _steps(self, rows_KD: Rows) -> UInt32s:
        """Bits of each row's step, uint32 (K,)."""
        steps_K = np.empty(len(rows_KD), dtype=np.uint32)
        kept = 0x7F800000 if self.scale == "pow2" else 0x7FFF8000
        limit = int(np.float32(_FLOAT32_MOST / self.top).view(np.uint32)) & kept
        scale_kernels.steps_above(rows_KD.view(np.uint32), np.float32(self.top), limit, self.scale_bytes, steps_K)
        return steps_K


int8, int4, int2 = (functools.partial(ScaledCodec, width) for width in (8, 4, 2))
"""Make the codec of a kind of scale."""
