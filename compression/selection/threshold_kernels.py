"""Kernels of selection: the largest of many magnitudes in O(n), without a sort.

A magnitude is the bits of a float32 without its sign, as int32: their order is that of the numbers, above them
infinity, above it NaN. A negative key represents a value that is never taken.
"""
# N = values

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Int32s, Ints
from shardkeep.base.compiling.kernels import kernel

BINS = 2048  # the exponent and 3 bits of the fraction
SHIFT = 20
LARGEST = np.float32(3.4028234663852886e38)

_KEYS = "Array(int32, 1, 'C', readonly=True)"


@kernel("float32(float64)")
def saturated(value: float) -> np.float32:
    """As float32; what is beyond its range, or NaN, becomes the largest finite number."""
    return np.float32(value) if value < LARGEST else LARGEST


@kernel("int64(int64[::1], int64)")
def boundary(counts: Ints, count: int) -> int:
    """The bin that holds the `count`-th largest, counted from the top; -1 if there are fewer. Counts become those of
    the bins above each."""
    above = 0
    bin_ = -1
    for b in range(counts.size - 1, -1, -1):
        here = counts[b]
        counts[b] = above
        above += here
        if bin_ < 0 and above >= count:
            bin_ = b
    return bin_


@kernel(f"int64({_KEYS}, int64, uint8[::1])")
def mark_largest(keys_N: Int32s, count: int, marks_N: Bytes) -> int:
    """Sets the marks of the `count` largest keys to 1 and leaves the others; of equal keys the first are taken.
    Returns how many were marked: fewer than `count` only if fewer are not negative.

    One pass over all for a histogram of exponents, then exact selection among the keys of the boundary bin, by their
    lower bits, ten at a time; one pass over all to mark."""
    counts = np.zeros(BINS, dtype=np.int64)
    eligible = 0
    for n in range(keys_N.size):
        if keys_N[n] >= 0:
            counts[keys_N[n] >> SHIFT] += 1
            eligible += 1
    number = min(count, eligible)
    if number <= 0:
        return 0
    inside = counts.copy()
    top = boundary(counts, number)
    left = number - counts[top]  # to take from the boundary bin
    members = np.empty(inside[top], dtype=np.int32)
    m = 0
    for n in range(keys_N.size):
        if keys_N[n] >> SHIFT == top:  # a negative key stays negative
            members[m] = keys_N[n]
            m += 1
    cut = np.int64(top)
    for shift in (10, 0):
        low = np.zeros(1024, dtype=np.int64)
        for i in range(members.size):
            if members[i] >> (shift + 10) == cut:
                low[(members[i] >> shift) & 1023] += 1
        digit = boundary(low, left)
        left -= low[digit]
        cut = (cut << 10) | digit
    for n in range(keys_N.size):
        if keys_N[n] > cut:
            marks_N[n] = 1
        elif keys_N[n] == cut and left > 0:
            marks_N[n] = 1
            left -= 1
    return number
