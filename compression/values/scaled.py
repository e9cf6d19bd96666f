"""The value codecs with a row scale: integers of 8, 4 and 2 bits, and signs.

A row is a step and a code for each value; it decodes to step * level of the code. Rules that hold for all:

- The step is the smallest with a code at which the row's largest magnitude is within the levels: nothing clips. It
  never falls below 2**-126 (so values below 2**-127 may become zero) and stops where the largest level is
  still a finite float32: magnitudes beyond that clip to it (int2 and sign: above 1.7e38; int4: 2.97e38).
- A row of zeros decodes to +0. A row with a NaN or an infinity decodes to a row of NaN.
- A step takes 1 byte, a power of two (`pow2`), or 2 bytes: the exponent and 8 bits of the mantissa of a float32
  (`fp16`, though with another exponent than IEEE's, for a gradient's step may be far below 6e-8).

Stateless; knows no error feedback.
"""
# K = rows, D = embedding dim, P = D filled up to a multiple of 8, R = bytes of one encoded row, B = rows of a block

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes, Rows, UInt32s
from shardkeep.compression.values import scale_kernels, scaled_kernels as kernels
from shardkeep.compression.values.codec import ValueCodec, check_bytes, check_rows
from shardkeep.compression.values.registry import Scale

Kernel = Callable[..., None]
BLOCK = 65536
"""Values that are encoded at a time: what is in between stays in a core's own cache."""
_FLOAT32_MOST = float(np.finfo(np.float32).max)


@dataclass(slots=True, eq=False)
class ScaledCodec:
    """A format of one step a row and `width` bits a value."""

    name: str
    tag: int
    scale: Scale
    width: int
    """Bits of a code: 1, 2, 4 or 8."""
    top: float
    """The level that the largest magnitude of a row may reach."""
    nearest: Kernel
    """Rounds values in steps, flat: they, the `arguments`, where the codes go."""
    arguments: tuple[Any, ...]
    levels: Rows | None
    """Level of each code, float32 (2 ** width,); None = a code is an integer in two's complement."""
    of_mean: bool = False
    """Whether the step is the mean magnitude, and not the largest."""

    @property
    def scale_bytes(self) -> int:
        return 1 if self.scale == "pow2" else 2

    def row_bytes(self, dim: int) -> int:
        """D codes, rounded up to bytes, and the scale."""
        return self.scale_bytes + (dim * self.width + 7) // 8

    def encode(self, rows_KD: Rows) -> Bytes:
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
            self.nearest(values_BP[:count].reshape(-1), *self.arguments, codes_BP[:count].reshape(-1))
            kernels.pack(codes_BP[:count], dim, self.width, steps_B, self.scale_bytes, encoded[start : start + size])
        return encoded

    def decode(self, encoded: Bytes, dim: int) -> Rows:
        """Fresh float32 (K, D). Raises CorruptMessage when the size is no multiple of a row's bytes."""
        check_bytes(encoded, self.row_bytes(dim))
        encoded_KR = np.ascontiguousarray(encoded).reshape(-1, self.row_bytes(dim))
        rows_KD = np.empty((len(encoded_KR), dim), dtype=np.float32)
        steps_K = np.empty(len(encoded_KR), dtype=np.float32)
        scale_kernels.read_steps(encoded_KR, self.scale_bytes, steps_K)
        codes, start = encoded_KR, self.scale_bytes
        if self.width < 8:
            codes, start = np.empty((len(encoded_KR), dim + -dim % 8), dtype=np.uint8), 0
            kernels.unpack(encoded_KR, self.width, self.scale_bytes, codes)
        if self.levels is not None:
            kernels.multiply(codes, start, steps_K, self.levels, rows_KD)
        else:
            kernels.multiply_integers(codes, start, self.width, steps_K, rows_KD)
        return rows_KD

    def _steps(self, rows_KD: Rows) -> UInt32s:
        """Bits of each row's step, uint32 (K,)."""
        steps_K = np.empty(len(rows_KD), dtype=np.uint32)
        kept = 0x7F800000 if self.scale == "pow2" else 0x7FFF8000
        limit = int(np.float32(_FLOAT32_MOST / self.top).view(np.uint32)) & kept
        if self.of_mean:
            scale_kernels.steps_of_mean(rows_KD, limit, self.scale_bytes, steps_K)
        else:
            scale_kernels.steps_above(rows_KD.view(np.uint32), np.float32(self.top), limit, self.scale_bytes, steps_K)
        return steps_K


def int8(*, tag: int, scale: Scale) -> ValueCodec:
    """-127 to 127."""
    return _integers("int8", tag, scale, width=8)


def int4(*, tag: int, scale: Scale) -> ValueCodec:
    """-7 to 7."""
    return _integers("int4", tag, scale, width=4)


def int2(*, tag: int, scale: Scale) -> ValueCodec:
    """-1, 0, 1."""
    return _integers("int2", tag, scale, width=2)


def _integers(name: str, tag: int, scale: Scale, *, width: int) -> ValueCodec:
    top, mask = np.int32(2 ** (width - 1) - 1), np.uint8(2**width - 1)
    return ScaledCodec(name, tag, scale, width, float(top), kernels.integers, (top, mask), levels=None)


def sign(*, tag: int, scale: Scale) -> ValueCodec:
    """+ or -, times the mean magnitude of the row."""
    levels = np.array([1.0, -1.0], dtype=np.float32)
    return ScaledCodec("sign", tag, scale, 1, 1.0, kernels.signs, (), levels, of_mean=True)
