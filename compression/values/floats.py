"""The codecs without a row scale: fp32 as it is, fp16 rounded.

Stateless; knows no error feedback. fp16 spans 6e-8 to 65504: smaller values become zero,
and a finite value beyond the range stays finite: it is sent as the largest one, and `saturated_values` counts
such values in what was sent, so that it can be reported. Infinities and NaN stay what they are.
"""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.compression.values.codec import RowCodec, check_rows
from shardkeep.compression.values.draws import Draws

W = TypeVar("W", bound=np.generic)
_INFINITY = 0x7C00
"""Bits of +inf in fp16; what is above is NaN, one below is the largest finite value."""


class Fp32(RowCodec):
    """The bytes of the rows themselves; encoding and decoding copy nothing."""

    def row_bytes(self, dim: int) -> int:
        """4 D."""
        return 4 * dim

    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        """A view of the rows as uint8 (K, 4 D)."""
        check_rows(rows_KD)
        return rows_KD.view(np.uint8)

    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        """A view of the bytes, as writeable as they are; a copy only where they are not aligned."""
        return _words(encoded_KR, np.float32).reshape(-1, dim)


class Half(RowCodec):
    """IEEE 754 binary16."""

    def row_bytes(self, dim: int) -> int:
        """2 D."""
        return 2 * dim

    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        """Fresh uint8 (K, 2 D), each value rounded to the nearest, ties to even."""
        check_rows(rows_KD)
        bits = torch.from_numpy(_writeable(rows_KD)).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
        if bits.size and int((bits & 0x7FFF).max()) >= _INFINITY:
            overflowed = ((bits & 0x7FFF) == _INFINITY) & np.isfinite(rows_KD)
            bits[overflowed] -= 1
        return bits.view(np.uint8)

    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        """Fresh float32 (K, D)."""
        bits = _words(encoded_KR, np.int16)
        values: Rows = torch.from_numpy(_writeable(bits)).view(torch.float16).to(torch.float32).numpy()
        return values.reshape(-1, dim)


def saturated_values(codec: RowCodec, encoded: Bytes) -> int:
    """How many of the encoded values are the largest finite number of fp16, of either sign: what
    `encode` sends for every finite value beyond the range. Either end can count them. 0 for fp32, and for formats with
    a row scale, which follows the row's largest value."""
    if not isinstance(codec, Half):
        return 0
    return int(np.count_nonzero((_words(encoded, np.uint16) & 0x7FFF) == _INFINITY - 1))


def _words(encoded: Bytes, dtype: type[W]) -> npt.NDArray[W]:
    """The bytes as one flat, aligned array of `dtype`; copied only where they are not aligned."""
    words = encoded.reshape(-1).view(dtype)
    return words if words.flags.aligned else words.copy()


def _writeable(array: npt.NDArray[W]) -> npt.NDArray[W]:
    """The array, or a copy where it is read-only: torch warns about those, even if it only reads."""
    return array if array.flags.writeable else array.copy()
