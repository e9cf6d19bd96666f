"""Kernels of codes of one set: bitmap and Rice; how long each is, its bytes, and the set back from them.

A set is a run of strictly rising int64, seen from an origin as w = id - origin, a uint64: the difference of any two ids
fits. `room` is how many values there could be, 0 <= w < room. Knows no sections and no headers.

Rice (1979) cuts each gap x = w[i] - w[i-1] - 1 into x >> width, written as so many zeros and a one, and `width` bits
as they are. All bits as they are come first, then the zeros and ones, then zeros up to a whole byte.
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.ids.bit_kernels import bit_length, get_bits, load, lowest_bit, put_bits

# What can be wrong with the bytes of a set.
OK, UNKNOWN, SHORT, LONG, HEADER, DISORDER, PADDING, BEYOND, COUNT, LIMIT = range(10)

_0, _1 = np.uint64(0), np.uint64(1)


@kernel("int64(int64)")
def whole_bytes(bits: int) -> int:
    return (bits + 7) >> 3


@kernel("int64(Array(int64, 1, 'C', readonly=True), int64, int64, uint64, int64)")
def sum_shifted(ids: Ints, begin: int, end: int, origin: np.uint64, width: int) -> int:
    """The sum of gap >> width; at widths where it is less than 2**63."""
    shift = np.uint64(width)
    total = (np.uint64(ids[begin]) - origin) >> shift
    for i in range(np.uint64(begin + 1), np.uint64(end)):
        total += (np.uint64(ids[i]) - np.uint64(ids[i - _1]) - _1) >> shift
    return np.int64(total)  # type: ignore[return-value]


@kernel("UniTuple(int64, 2)(Array(int64, 1, 'C', readonly=True), int64, int64, uint64)")
def rice_size(ids: Ints, begin: int, end: int, origin: np.uint64) -> tuple[int, int]:
    """The width of the shortest Rice code of ids[begin:end], which are some, and its bits.

    The length is a convex function of the width: one bit more costs n bits and saves sum(ceil(x / 2)) zeros, x being
    gap >> width, which only falls. A width of 2 ** width > mean gap never saves n, so the search goes down from there.
    """
    count = end - begin
    sum_gaps = np.uint64(ids[end - 1]) - origin - np.uint64(count - 1)
    width = min(bit_length(sum_gaps // np.uint64(count)), 63)
    best = count * (width + 1) + sum_shifted(ids, begin, end, origin, width)
    while width > 0:
        bits = count * width + sum_shifted(ids, begin, end, origin, width - 1)
        if bits >= best:
            break
        best = bits
        width -= 1
    return width, best


@kernel("void(uint8[::1], int64, Array(int64, 1, 'C', readonly=True), int64, int64, uint64)")
def write_bitmap(area: Bytes, at: int, ids: Ints, begin: int, end: int, origin: np.uint64) -> None:
    """A bit for each value, from byte `at` on, where zeros are."""
    for i in range(begin, end):
        w = np.uint64(ids[i]) - origin
        area[np.uint64(at) + (w >> np.uint64(3))] |= np.uint8(_1 << (w & np.uint64(7)))


@kernel("void(uint8[::1], int64, Array(int64, 1, 'C', readonly=True), int64, int64, uint64, int64)")
def write_rice(area: Bytes, at: int, ids: Ints, begin: int, end: int, origin: np.uint64, width: int) -> None:
    """Rice's code, from byte `at` on, where zeros are."""
    shift = np.uint64(width)
    mask = (_1 << shift) - _1
    low_at = 8 * at
    one_at = low_at + (end - begin) * width  # where the next one would stand, had it no zeros in front
    base = origin
    for i in range(begin, end):
        x = np.uint64(ids[i]) - base
        put_bits(area, low_at, x & mask, width)
        low_at += width
        zeros: int = np.int64(x >> shift)  # type: ignore[assignment]
        one = one_at + zeros
        area[np.uint64(one >> 3)] |= np.uint8(1 << (one & 7))
        base = np.uint64(ids[i]) + _1
        one_at = one + 1


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, uint64, uint64, int64[::1], int64)")
def read_bitmap(
    area: Bytes, at: int, end: int, count: int, room: np.uint64, origin: np.uint64, out: Ints, to: int
) -> int:
    """Fills out[to:to + count] from the bytes [at, end). Returns OK or what is wrong."""
    filled = 0
    for byte in range(at, end, 8):
        word = load(area, byte, end)
        while word != _0:
            w = np.uint64(8 * (byte - at) + lowest_bit(word))
            if w >= room:
                return BEYOND
            if filled == count:
                return COUNT
            out[to + filled] = np.int64(origin + w)
            filled += 1
            word &= word - _1
    return OK if filled == count else COUNT


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, uint64, uint64, int64, int64[::1], int64)")
def read_rice(
    area: Bytes, at: int, end: int, count: int, room: np.uint64, origin: np.uint64, width: int, out: Ints, to: int
) -> int:
    """Fills out[to:to + count] from Rice's code in the bytes [at, end). Returns OK or what is wrong.

    `count` is at most some 2**57, `width` 0 to 63."""
    if count == 0:
        return OK if at == end else LONG
    if count * (width + 1) > 8 * (end - at):
        return SHORT
    if np.uint64(count) > room:
        return BEYOND
    low_at = 8 * at
    ones_at = low_at + count * width
    word_at = ones_at & ~7  # bits of the word in work; those done with are cleared
    word = load(area, word_at >> 3, end) & (~_0 << np.uint64(ones_at & 7))
    shift = np.uint64(width)
    most = ~_0 >> shift
    free = room - np.uint64(count)  # what the gaps may add up to
    sum_gaps = _0
    one = ones_at - 1
    for i in range(count):
        before = one
        while word == _0:
            word_at += 64
            if word_at >= 8 * end:
                return SHORT
            word = load(area, word_at >> 3, end)
        one = word_at + lowest_bit(word)
        word &= word - _1
        zeros = np.uint64(one - before - 1)
        if zeros > most:
            return BEYOND
        x = (zeros << shift) | get_bits(area, low_at, width, end)
        low_at += width
        if x > free - sum_gaps:
            return BEYOND
        sum_gaps += x
        out[to + i] = np.int64(origin + sum_gaps + np.uint64(i))
    if (one >> 3) != end - 1:
        return LONG
    return PADDING if word != _0 else OK
