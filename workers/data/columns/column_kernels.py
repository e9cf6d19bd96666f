"""Kernels of stored columns: coding of ids, rows picked out of columns, and what turns stored numbers into inputs.

N = values, B = rows asked for, K = places of a hash table, D = distinct ids, V = entries of lists
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from shardkeep.base.array_kernels import pointer
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix

ALL = 1 << 31
"""More entries than a list can have."""


@kernel("int64(Array(int64, 1, 'C', readonly=True), int64, int32[::1], int64[::1], int64, int32[::1])")
def code_ids(
    ids_N: NDArray[np.int64],
    start: int,
    code_K: NDArray[np.int32],
    id_D: NDArray[np.int64],
    count: int,
    code_N: NDArray[np.int32],
) -> int:
    """Codes ids from `start` on by their places in `id_D`, to which it appends. `code_K`: 2^k places, -1 = free.

    Returns `count`, the ids that `id_D` holds, or below 0 the place -1 - i of the id i for which it has no room."""
    mask = np.uint64(len(code_K) - 1)
    for i in range(start, len(ids_N)):
        place = mix(np.uint64(ids_N[i]) + GOLDEN) & mask
        while code_K[place] >= 0 and id_D[code_K[place]] != ids_N[i]:
            place = (place + np.uint64(1)) & mask
        if code_K[place] < 0:
            if count == len(id_D):
                return -1 - i
            code_K[place], id_D[count] = count, ids_N[i]
            count += 1
        code_N[i] = code_K[place]
    return count


@kernel(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1])",
    "void(Array(uint16, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1])",
)
def take_coded(
    code_N: NDArray[Any], id_D: NDArray[np.int64], rows_B: NDArray[np.int64], out_B: NDArray[np.int64]
) -> None:
    """Ids that are stored as places of a dictionary."""
    for b in range(len(rows_B)):
        out_B[b] = id_D[code_N[rows_B[b]]]


@kernel("void(int64[:,::1], int64, int64[::1], int64[:,::1])")
def take_features(
    column_F3: NDArray[np.int64], count: int, rows_B: NDArray[np.int64], out_FB: NDArray[np.int64]
) -> None:
    """The ids of columns of `count` rows each, by the address of the values, the bytes of one, and the address of the
    dictionary: one call, where numba takes 2 us for each."""
    for f in range(len(column_F3)):
        values, ids = pointer(column_F3[f, 0]), pointer(column_F3[f, 2])
        if column_F3[f, 1] == 8:
            id_N = carray(values, (count,), np.int64)
            for b in range(len(rows_B)):
                out_FB[f, b] = id_N[rows_B[b]]
        elif column_F3[f, 1] == 2:
            take_coded(carray(values, (count,), np.uint16), carray(ids, (1 << 16,), np.int64), rows_B, out_FB[f])
        else:
            take_coded(carray(values, (count,), np.uint8), carray(ids, (1 << 8,), np.int64), rows_B, out_FB[f])


@kernel(
    "void(Array(uint8, 1, 'C', readonly=True), int64[::1], boolean, float64, float32, float32, float32, float32[:])",
    "void(Array(float32, 1, 'C', readonly=True), int64[::1], boolean, float64, float32, float32, float32, float32[:])",
    "void(Array(float64, 1, 'C', readonly=True), int64[::1], boolean, float64, float32, float32, float32, float32[:])",
)
def take_inputs(
    number_N: NDArray[Any],
    rows_B: NDArray[np.int64],
    log: bool,
    origin: float,
    fill: np.float32,
    shift: np.float32,
    factor: np.float32,
    out_B: NDArray[np.float32],
) -> None:
    """(float32(x - origin) - shift) * factor, of x or of sign(x) * log(1 + |x|); `fill` where x is nan."""
    for b in range(len(rows_B)):
        x: float = np.float64(number_N[rows_B[b]])
        if log:
            x = math.log1p(x) if x >= 0.0 else -math.log1p(-x)
        out_B[b] = fill if math.isnan(x) else (np.float32(x - origin) - shift) * factor


@kernel(
    "void(int64[:,::1], int64, int64[::1], boolean[::1], float64[::1], float32[::1], float32[::1], float32[::1],"
    " float32[:,::1])"
)
def take_dense(
    column_I4: NDArray[np.int64],
    count: int,
    rows_B: NDArray[np.int64],
    log_I: NDArray[np.bool_],
    origin_I: NDArray[np.float64],
    fill_I: NDArray[np.float32],
    shift_I: NDArray[np.float32],
    factor_I: NDArray[np.float32],
    out_BI: NDArray[np.float32],
) -> None:
    """As `take_inputs` of columns of `count` rows each, by the address of the values, the bytes of one, the numbers of
    a row, and which of them it is."""
    places_B = np.empty_like(rows_B)
    for i in range(len(column_I4)):
        values, width = pointer(column_I4[i, 0]), column_I4[i, 2]
        for b in range(len(rows_B)):
            places_B[b] = rows_B[b] * width + column_I4[i, 3]
        scale, out_B = (log_I[i], origin_I[i], fill_I[i], shift_I[i], factor_I[i]), out_BI[:, i]
        if column_I4[i, 1] == 1:
            take_inputs(carray(values, (count * width,), np.uint8), places_B, *scale, out_B)
        elif column_I4[i, 1] == 4:
            take_inputs(carray(values, (count * width,), np.float32), places_B, *scale, out_B)
        else:
            take_inputs(carray(values, (count * width,), np.float64), places_B, *scale, out_B)


@kernel(
    "int64(Array(int32, 1, 'C', readonly=True), int64[::1], int64, int32[::1])",
    "int64(Array(int64, 1, 'C', readonly=True), int64[::1], int64, int32[::1])",
)
def list_sizes(offset_N1: NDArray[Any], rows_B: NDArray[np.int64], most: int, length_B: NDArray[np.int32]) -> int:
    """Entries of each row, at most `most`; returns their sum."""
    total = 0
    for b in range(len(rows_B)):
        length_B[b] = min(offset_N1[rows_B[b] + 1] - offset_N1[rows_B[b]], most)
        total += length_B[b]
    return total


@kernel(
    "void(Array(int32, 1, 'C', readonly=True), int64[::1], int64, int64[::1])",
    "void(Array(int64, 1, 'C', readonly=True), int64[::1], int64, int64[::1])",
)
def entry_places(offset_N1: NDArray[Any], rows_B: NDArray[np.int64], kept: int, place_V: NDArray[np.int64]) -> None:
    """Where the entries of rows lie, one row after the other: the last `kept` of each, or below 0 the first `-kept`,
    from the last of them to the first."""
    v = 0
    for b in range(len(rows_B)):
        first, end = int(offset_N1[rows_B[b]]), int(offset_N1[rows_B[b] + 1])
        if kept < 0:
            for j in range(min(end, first - kept) - 1, first - 1, -1):
                place_V[v] = j
                v += 1
        else:
            for j in range(max(first, end - kept), end):
                place_V[v] = j
                v += 1


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
