"""Kernels of bits: fields of up to 64 bits and varints (LEB128) in a uint8 array, little end first.

Every reader is given the first byte that is not its own any more (`end`) and looks at nothing from there on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from shardkeep.base.arrays import Bytes
from shardkeep.base.compiling.kernels import kernel

_leading_zeros: Any = numbers.leading_zeros
_trailing_zeros: Any = numbers.trailing_zeros

ENDED, OVERLONG = -1, -2
"""What `get_varint` answers instead of a place: the bytes ended within, or it is no number's shortest form."""
_0, _1, _6, _7, _8, _63, _127, _128 = (np.uint64(n) for n in (0, 1, 6, 7, 8, 63, 127, 128))


@kernel("int64(uint64)")
def bit_length(x: np.uint64) -> int:
    """Bits of a number without its leading zeros; 0 has none."""
    length: int = 64 - np.int64(_leading_zeros(x))  # type: ignore[assignment]
    return length


@kernel("int64(uint64)")
def lowest_bit(x: np.uint64) -> int:
    """The number of the lowest bit that is set; 64 where none is."""
    place: int = np.int64(_trailing_zeros(x))  # type: ignore[assignment]
    return place


@kernel("uint64(Array(uint8, 1, 'C', readonly=True), int64, int64)")
def load(area: Bytes, at: int, end: int) -> np.uint64:
    """8 bytes as a number; those from `end` on count as zeros."""
    word = _0
    first = np.uint64(at)  # unsigned: no question whether an index counts from the end, so this is one load
    if at + 8 <= end:
        for i in range(8):
            word |= np.uint64(area[first + np.uint64(i)]) << np.uint64(8 * i)
        return word
    for i in range(end - at):
        word |= np.uint64(area[first + np.uint64(i)]) << np.uint64(8 * i)
    return word


@kernel("uint64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64)")
def get_bits(area: Bytes, at: int, width: int, end: int) -> np.uint64:
    """The `width` (0 to 63) bits from bit `at` on; the caller has seen that they end before byte `end`."""
    skip = at & 7
    word = load(area, at >> 3, end) >> np.uint64(skip)
    if skip + width > 64:
        word |= np.uint64(area[(at >> 3) + 8]) << np.uint64(64 - skip)
    return word & ((_1 << np.uint64(width)) - _1)


@kernel("void(uint8[::1], int64, uint64, int64)")
def put_bits(area: Bytes, at: int, value: np.uint64, width: int) -> None:
    """Writes the lowest `width` bits, all that `value` has, where zeros are."""
    while width > 0:
        skip = at & 7
        area[np.uint64(at >> 3)] |= np.uint8((value << np.uint64(skip)) & np.uint64(255))
        value >>= np.uint64(8 - skip)
        at += 8 - skip
        width -= 8 - skip


@kernel("uint64(int64)")
def zigzag(x: int) -> np.uint64:
    """A signed number as an unsigned one, near zero where it is: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    return np.uint64(x << 1) ^ np.uint64(x >> 63)


@kernel("int64(uint64)")
def unzigzag(x: np.uint64) -> int:
    number: int = np.int64((x >> _1) ^ (_0 - (x & _1)))  # type: ignore[assignment]
    return number


@kernel("int64(uint64)")
def varint_size(x: np.uint64) -> int:
    """Bytes of a varint: 7 bits in each."""
    return (bit_length(x | _1) + 6) // 7


@kernel("int64(uint8[::1], int64, uint64)")
def put_varint(area: Bytes, at: int, x: np.uint64) -> int:
    """Writes a varint; where it ends."""
    while x >= _128:
        area[at] = np.uint8((x & _127) | _128)
        x >>= _7
        at += 1
    area[at] = np.uint8(x)
    return at + 1


@kernel("Tuple((uint64, int64))(Array(uint8, 1, 'C', readonly=True), int64, int64)")
def get_varint(area: Bytes, at: int, end: int) -> tuple[np.uint64, int]:
    """The number of a varint, and where it ends; ENDED or OVERLONG in place of that."""
    x = _0
    for i in range(10):
        if at >= end:
            return x, ENDED
        byte = np.uint64(area[at])
        at += 1
        if i == 9 and byte > _1:  # bit 64 and above
            return x, OVERLONG
        x |= (byte & _127) << np.uint64(7 * i)
        if byte < _128:
            return x, (OVERLONG if byte == _0 and i > 0 else at)
    return x, OVERLONG
