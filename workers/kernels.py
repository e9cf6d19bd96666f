"""Kernels of the embedding layer: deduplicating ids, pooling rows, summing gradients back, row scans.

Callers check shapes and bounds; nothing is checked here. Every sum runs in sample order, so results are
a function of the inputs alone. Read-only inputs are accepted where a kernel only reads.
"""
# N = ids of one table or feature, U = unique ids, B = samples of a part, D = embedding dim

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.kernels import kernel

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

_IDS = "Array(int64, 1, 'C', readonly=True)"
_POSITIONS = "Array(int32, 1, 'C', readonly=True)"
_WEIGHTS = "Array(float32, 1, 'C', readonly=True)"
_ROWS = "Array(float32, 2, 'C', readonly=True)"


@kernel(f"int64({_IDS}, int32[::1], int64[::1], int32[::1])")
def first_seen(ids_N: Int64, slots: Int32, unique_N: Int64, inverse_N: Int32) -> int:
    """Numbers the distinct ids by first appearance: fills the head of `unique_N` and all of `inverse_N`,
    returns their count. `slots`: a power of two > N entries, all -1; in the end the index of `unique_N`."""
    mask = np.uint64(slots.size - 1)
    count = 0
    for n in range(ids_N.size):
        key = ids_N[n]
        mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
        slot = (mixed ^ (mixed >> np.uint64(32))) & mask
        while slots[slot] >= 0 and unique_N[slots[slot]] != key:
            slot = (slot + np.uint64(1)) & mask
        found = slots[slot]
        if found < 0:
            found = np.int32(count)
            slots[slot] = found
            unique_N[count] = key
            count += 1
        inverse_N[n] = found
    return count


@kernel("void(int64[::1], int32[::1], int64[::1], int32[::1], int32[::1])")
def renumber_sorted(sorted_U: Int64, slots: Int32, unique_N: Int64, rank_U: Int32, inverse_N: Int32) -> None:
    """Turns the numbers of `first_seen` into positions in `sorted_U`, by looking every sorted id up again:
    sorting values and probing costs a third of an argsort."""
    mask = np.uint64(slots.size - 1)
    for rank in range(sorted_U.size):
        key = sorted_U[rank]
        mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
        slot = (mixed ^ (mixed >> np.uint64(32))) & mask
        while unique_N[slots[slot]] != key:
            slot = (slot + np.uint64(1)) & mask
        rank_U[slots[slot]] = rank
    for n in range(inverse_N.size):
        inverse_N[n] = rank_U[inverse_N[n]]


@kernel(f"void({_ROWS}, {_POSITIONS}, float32[:, ::1])")
def gather_rows(rows_UD: Float32, inverse_B: Int32, out_BD: Float32) -> None:
    """One id per sample: `out[b] = rows[inverse[b]]`."""
    for b in range(inverse_B.size):
        u = inverse_B[b]
        for d in range(rows_UD.shape[1]):
            out_BD[b, d] = rows_UD[u, d]


@kernel(f"void({_ROWS}, {_POSITIONS}, {_POSITIONS}, {_WEIGHTS}, boolean, float32[:, ::1])")
def pool_rows(
    rows_UD: Float32, inverse_N: Int32, offsets_B1: Int32, weights_N: Float32, mean: bool, out_BD: Float32
) -> None:
    """Bag b holds the ids n in [offsets[b], offsets[b + 1]): `out[b] = sum_n weight[n] * rows[inverse[n]]`,
    divided by their number with `mean`; an empty bag is zero. No `weights_N` = all 1."""
    dim = rows_UD.shape[1]
    for b in range(offsets_B1.size - 1):
        start, end = offsets_B1[b], offsets_B1[b + 1]
        for d in range(dim):
            out_BD[b, d] = np.float32(0.0)
        for n in range(start, end):
            u = inverse_N[n]
            weight = weights_N[n] if weights_N.size > 0 else np.float32(1.0)
            for d in range(dim):
                out_BD[b, d] += weight * rows_UD[u, d]
        if mean and end - start > 1:
            scale = np.float32(1.0) / np.float32(end - start)
            for d in range(dim):
                out_BD[b, d] *= scale


@kernel(f"void({_ROWS}, {_POSITIONS}, float32[:, ::1])")
def add_gathered(grad_BD: Float32, inverse_B: Int32, grad_UD: Float32) -> None:
    """The transpose of `gather_rows`, added: `grad_U[inverse[b]] += grad_B[b]`, in the order of b."""
    for b in range(inverse_B.size):
        u = inverse_B[b]
        for d in range(grad_BD.shape[1]):
            grad_UD[u, d] += grad_BD[b, d]


@kernel(f"void({_ROWS}, {_POSITIONS}, {_POSITIONS}, {_WEIGHTS}, boolean, float32[:, ::1])")
def add_pooled(
    grad_BD: Float32, inverse_N: Int32, offsets_B1: Int32, weights_N: Float32, mean: bool, grad_UD: Float32
) -> None:
    """The transpose of `pool_rows`, added, in the order of n. Weights and `mean` exclude each other."""
    for b in range(offsets_B1.size - 1):
        start, end = offsets_B1[b], offsets_B1[b + 1]
        scale = np.float32(1.0) / np.float32(end - start) if mean and end > start else np.float32(1.0)
        for n in range(start, end):
            u = inverse_N[n]
            weight = weights_N[n] if weights_N.size > 0 else scale
            for d in range(grad_BD.shape[1]):
                grad_UD[u, d] += weight * grad_BD[b, d]


@kernel("void(Array(uint32, 2, 'C', readonly=True), boolean[::1])")
def find_non_finite(bits_UD: npt.NDArray[np.uint32], bad_U: npt.NDArray[np.bool_]) -> None:
    """Whether a row, given as its bits, holds an infinity or a NaN: all bits of an exponent are set."""
    for u in range(bits_UD.shape[0]):
        largest = np.uint32(0)
        for d in range(bits_UD.shape[1]):
            largest = max(largest, bits_UD[u, d] & np.uint32(0x7FFFFFFF))
        bad_U[u] = largest >= np.uint32(0x7F800000)
