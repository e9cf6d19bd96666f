"""Kernels that pick rows out of the memory-mapped cache. A row is found by its chunk's offset: no search.

B = rows asked for, C = chunks of 65,536 rows, I = dense columns, F = single-valued features, N = ids picked
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix

CHUNK_BITS = 16
CHUNK_ROWS = 1 << CHUNK_BITS
CHUNK_MASK = CHUNK_ROWS - 1
ALL = 1 << 31
"""More entries than a list can have."""


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64[::1], int64, int64[::1], int64[::1], float32[::1], float32[::1],"
    " float32[::1], float32[:,::1])"
)
def gather_dense(
    floats: NDArray[np.float32],
    start_C: NDArray[np.int64],
    width: int,
    place_I: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    fill_I: NDArray[np.float32],
    shift_I: NDArray[np.float32],
    factor_I: NDArray[np.float32],
    out_BI: NDArray[np.float32],
) -> None:
    """out = fill where the stored number is nan, else (stored - shift) * factor. A row has `width` numbers side by
    side, of which those at the places are read."""
    for b in range(len(rows_B)):
        row = rows_B[b]
        at = start_C[row >> CHUNK_BITS] + (row & CHUNK_MASK) * width
        for i in range(len(place_I)):
            x = floats[at + place_I[i]]
            out_BI[b, i] = fill_I[i] if np.isnan(x) else (x - shift_I[i]) * factor_I[i]


@kernel("void(Array(int64, 1, 'C', readonly=True), int64[::1], int64, int64[::1], int64[::1], int64[:,::1])")
def gather_ids(
    words: NDArray[np.int64],
    start_C: NDArray[np.int64],
    width: int,
    place_F: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    out_FB: NDArray[np.int64],
) -> None:
    """Single-valued features, whose ids lie in the cache as the numbers of `gather_dense`."""
    for b in range(len(rows_B)):
        row = rows_B[b]
        at = start_C[row >> CHUNK_BITS] + (row & CHUNK_MASK) * width
        for f in range(len(place_F)):
            out_FB[f, b] = words[at + place_F[f]]


@kernel(
    "void(Array(uint8, 1, 'C', readonly=True), int64[::1], int64[::1], float32[::1])",
    "void(Array(float32, 1, 'C', readonly=True), int64[::1], int64[::1], float32[::1])",
)
def gather_labels(
    labels: NDArray[np.uint8] | NDArray[np.float32],
    start_C: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    out_B: NDArray[np.float32],
) -> None:
    """Labels: one byte each for 0 and 1, else floats."""
    for b in range(len(rows_B)):
        row = rows_B[b]
        out_B[b] = labels[start_C[row >> CHUNK_BITS] + (row & CHUNK_MASK)]


@kernel("int64(Array(int32, 1, 'C', readonly=True), int64[::1], int64[::1], int64, int32[::1])")
def gather_lengths(
    offsets: NDArray[np.int32],
    start_C: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    most: int,
    out_B: NDArray[np.int32],
) -> int:
    """Entries per row of lists, at most `most`; returns their sum."""
    total = 0
    for b in range(len(rows_B)):
        row = rows_B[b]
        at = start_C[row >> CHUNK_BITS] + (row & CHUNK_MASK)
        out_B[b] = min(offsets[at + 1] - offsets[at], most)
        total += out_B[b]
    return total


@kernel(
    "void(Array(int32, 1, 'C', readonly=True), int64[::1], Array(int64, 1, 'C', readonly=True), int64[::1],"
    " int64[::1], int64, int64[::1])",
    "void(Array(int32, 1, 'C', readonly=True), int64[::1], Array(float32, 1, 'C', readonly=True), int64[::1],"
    " int64[::1], int64, float32[::1])",
)
def gather_lists(
    offsets: NDArray[np.int32],
    start_C: NDArray[np.int64],
    values: NDArray[np.int64] | NDArray[np.float32],
    value_start_C: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    kept: int,
    out_N: NDArray[np.int64] | NDArray[np.float32],
) -> None:
    """Entries of the rows, one row after the other: the last `kept` of each, or below 0 the first `-kept`, from the
    last of them to the first."""
    n = 0
    for b in range(len(rows_B)):
        chunk = rows_B[b] >> CHUNK_BITS
        at = start_C[chunk] + (rows_B[b] & CHUNK_MASK)
        first, length = value_start_C[chunk] + offsets[at], int(offsets[at + 1] - offsets[at])
        if kept < 0:
            for j in range(first + min(length, -kept) - 1, first - 1, -1):
                out_N[n] = values[j]
                n += 1
        else:
            for j in range(first + max(0, length - kept), first + length):
                out_N[n] = values[j]
                n += 1


@kernel("void(uint64, int64[::1], float64, float64, uint8[::1])")
def part(key: np.uint64, values_N: NDArray[np.int64], held: float, tested: float, out_N: NDArray[np.uint8]) -> None:
    """Parts rows by splitmix64 of (key, value): a share `held` becomes 1, a share `tested` 2, the rest 0."""
    for i in range(len(out_N)):
        x = mix(key + np.uint64(values_N[i]) * GOLDEN)
        place = float(x >> np.uint64(11)) * 1.1102230246251565e-16
        out_N[i] = 1 if place < held else 2 if place < held + tested else 0


@kernel("void(uint64[::1], int64[::1], int64[::1])")
def fold(hash_N: NDArray[np.uint64], lengths_N: NDArray[np.int64], values_V: NDArray[np.int64]) -> None:
    """Mixes the values of each row, and how many they are, into its hash."""
    v = 0
    for i in range(len(hash_N)):
        x = mix(hash_N[i] + np.uint64(lengths_N[i]) * GOLDEN)
        for _ in range(lengths_N[i]):
            x = mix(x + np.uint64(values_V[v]) * GOLDEN)
            v += 1
        hash_N[i] = x
