"""Kernels of the embedding layer: deduplicating ids, pooling rows, summing gradients back, row scans.

Callers check shapes and bounds; nothing is checked here. Every sum runs in sample order, so results are
a function of the inputs alone. Read-only inputs are accepted where a kernel only reads.
"""
# N = ids, U = distinct ids of a table, V = those of all tables, T = tables, F = features,
# B = samples of a part, D = embedding dim

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Bools, Floats, Int32s, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN

_IDS = "Array(int64, 1, 'C', readonly=True)"
_POSITIONS = "Array(int32, 1, 'C', readonly=True)"
_WEIGHTS = "Array(float32, 1, 'C', readonly=True)"
_ROWS = "Array(float32, 2, 'C', readonly=True)"
_VALUES = "Array(float32, 1, 'C', readonly=True)"


@kernel("int64(int64)")
def bits_of(number: int) -> int:
    """`int.bit_length` of a number that is not negative."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@kernel(f"int64({_IDS}, int32[::1], int64[::1], int32[::1])")
def number_ids(ids_N: Ints, slots: Int32s, distinct_U: Ints, inverse_N: Int32s) -> int:
    """Numbers distinct ids by first appearance: `distinct` by number, `inverse` the number of each. Returns how many
    there are. `slots`: a power of two > ids, all -1."""
    count = 0
    mask = np.uint64(slots.size - 1)
    for n in range(ids_N.size):
        key = ids_N[n]
        mixed = np.uint64(key) * GOLDEN
        slot = (mixed ^ (mixed >> np.uint64(32))) & mask
        while slots[slot] >= 0 and distinct_U[slots[slot]] != key:
            slot = (slot + np.uint64(1)) & mask
        number = slots[slot]
        if number < 0:
            number = np.int32(count)
            slots[slot] = number
            distinct_U[count] = key
            count += 1
        inverse_N[n] = number
    return count


@kernel("void(int64[::1], int64[::1], int32[::1], int32[::1])")
def sort_ids(keys_U: Ints, spare_U: Ints, order_U: Int32s, spare_order_U: Int32s) -> None:
    """Sorts keys ascending, in place; `order`: where each came from. Radix sort (LSD, 8 bits a pass), of the bytes
    in which the keys differ: ids of a table below 2**24 take three passes. The scratch arrays have the same size."""
    size = keys_U.size
    differ = np.uint64(0)
    for i in range(size):
        order_U[i] = i
        differ |= np.uint64(keys_U[i] ^ keys_U[0])
    starts = np.empty(257, dtype=np.int64)
    swapped = False
    for byte in range(8):
        shift = np.uint64(8 * byte)
        if (differ >> shift) & np.uint64(255) == np.uint64(0):
            continue
        flip = np.uint64(128 if byte == 7 else 0)  # the sign: negative keys come first
        source, target = (spare_U, keys_U) if swapped else (keys_U, spare_U)
        source_order, target_order = (spare_order_U, order_U) if swapped else (order_U, spare_order_U)
        starts[:] = 0
        for i in range(size):
            starts[np.int64(((np.uint64(source[i]) >> shift) & np.uint64(255)) ^ flip) + 1] += 1
        for digit in range(256):
            starts[digit + 1] += starts[digit]
        for i in range(size):
            at = np.int64(((np.uint64(source[i]) >> shift) & np.uint64(255)) ^ flip)
            to = starts[at]
            starts[at] = to + 1
            target[to] = source[i]
            target_order[to] = source_order[i]
        swapped = not swapped
    if swapped:
        keys_U[:] = spare_U
        order_U[:] = spare_order_U


@kernel(f"void({_IDS}, int64[::1], int64[::1], int64[::1], int32[::1])")
def dedupe(ids_N: Ints, bounds_T1: Ints, starts_T1: Ints, unique_V: Ints, inverse_N: Int32s) -> None:
    """The distinct ids of each table, ascending, one table after the other; and each id's position among its table's.

    Table t has the ids from `bounds[t]` up to `bounds[t + 1]`. `unique` has room for all ids. All that one table needs
    fits the first-level cache for a batch of a few thousand."""
    largest = 0
    for t in range(bounds_T1.size - 1):
        largest = max(largest, bounds_T1[t + 1] - bounds_T1[t])
    slots = np.empty(1 << (max(4, bits_of(2 * largest))), dtype=np.int32)
    spare, order = np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int32)
    spare_order, rank = np.empty(largest, dtype=np.int32), np.empty(largest, dtype=np.int32)
    start = 0
    for t in range(bounds_T1.size - 1):
        starts_T1[t] = start
        if bounds_T1[t + 1] == bounds_T1[t]:
            continue
        ids, inverse = ids_N[bounds_T1[t] : bounds_T1[t + 1]], inverse_N[bounds_T1[t] : bounds_T1[t + 1]]
        own_slots = slots[: 1 << (max(4, bits_of(2 * ids.size)))]
        own_slots[:] = -1
        distinct = unique_V[start : start + ids.size]
        count = number_ids(ids, own_slots, distinct, inverse)
        sort_ids(distinct[:count], spare[:count], order[:count], spare_order[:count])
        for i in range(count):
            rank[order[i]] = i
        for n in range(inverse.size):
            inverse[n] = rank[inverse[n]]
        start += count
    starts_T1[-1] = start


@kernel(f"void({_ROWS}, {_POSITIONS}, float32[:, ::1])")
def gather_rows(rows_UD: Floats, inverse_B: Int32s, out_BD: Floats) -> None:
    """One id per sample: `out[b] = rows[inverse[b]]`."""
    for b in range(inverse_B.size):
        u = inverse_B[b]
        for d in range(rows_UD.shape[1]):
            out_BD[b, d] = rows_UD[u, d]


@kernel(f"void({_ROWS}, {_POSITIONS}, {_POSITIONS}, {_WEIGHTS}, boolean, float32[:, ::1])")
def pool_rows(
    rows_UD: Floats, inverse_N: Int32s, offsets_B1: Int32s, weights_N: Floats, mean: bool, out_BD: Floats
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
def add_gathered(grad_BD: Floats, inverse_B: Int32s, grad_UD: Floats) -> None:
    """The transpose of `gather_rows`, added: `grad_U[inverse[b]] += grad_B[b]`, in the order of b."""
    for b in range(inverse_B.size):
        u = inverse_B[b]
        for d in range(grad_UD.shape[1]):
            grad_UD[u, d] += grad_BD[b, d]


@kernel(f"void({_ROWS}, {_POSITIONS}, {_POSITIONS}, {_WEIGHTS}, boolean, float32[:, ::1])")
def add_pooled(
    grad_BD: Floats, inverse_N: Int32s, offsets_B1: Int32s, weights_N: Floats, mean: bool, grad_UD: Floats
) -> None:
    """The transpose of `pool_rows`, added, in the order of n. Weights and `mean` exclude each other."""
    for b in range(offsets_B1.size - 1):
        start, end = offsets_B1[b], offsets_B1[b + 1]
        scale = np.float32(1.0) / np.float32(end - start) if mean and end > start else np.float32(1.0)
        for n in range(start, end):
            u = inverse_N[n]
            weight = weights_N[n] if weights_N.size > 0 else scale
            for d in range(grad_UD.shape[1]):
                grad_UD[u, d] += weight * grad_BD[b, d]


@kernel(f"void({_ROWS}, {_POSITIONS}, {_POSITIONS}, float32[:, ::1])")
def pool_max(rows_UD: Floats, inverse_N: Int32s, offsets_B1: Int32s, out_BD: Floats) -> None:
    """Bags as in `pool_rows`: `out[b, d]` is the largest of the rows' values, a NaN if one is; an empty bag is zero."""
    for b in range(offsets_B1.size - 1):
        start, end = offsets_B1[b], offsets_B1[b + 1]
        for d in range(rows_UD.shape[1]):
            out_BD[b, d] = rows_UD[inverse_N[start], d] if end > start else np.float32(0.0)
        for n in range(start + 1, end):
            u = inverse_N[n]
            for d in range(rows_UD.shape[1]):
                value = rows_UD[u, d]
                if value > out_BD[b, d] or value != value:
                    out_BD[b, d] = value


@kernel(f"void({_ROWS}, {_ROWS}, {_POSITIONS}, {_POSITIONS}, float32[:, ::1])")
def add_max(rows_UD: Floats, grad_BD: Floats, inverse_N: Int32s, offsets_B1: Int32s, grad_UD: Floats) -> None:
    """The transpose of `pool_max`, added, in the order of b: each gradient goes to the first row with the largest
    value."""
    largest_D = np.empty(grad_BD.shape[1], dtype=np.float32)
    row_D = np.empty(grad_BD.shape[1], dtype=np.int32)
    for b in range(offsets_B1.size - 1):
        start, end = offsets_B1[b], offsets_B1[b + 1]
        if end == start:
            continue
        for d in range(grad_BD.shape[1]):
            row_D[d] = inverse_N[start]
            largest_D[d] = rows_UD[inverse_N[start], d]
        for n in range(start + 1, end):
            u = inverse_N[n]
            for d in range(grad_BD.shape[1]):
                if rows_UD[u, d] > largest_D[d]:
                    row_D[d], largest_D[d] = u, rows_UD[u, d]
        for d in range(grad_BD.shape[1]):
            grad_UD[row_D[d], d] += grad_BD[b, d]


# A feature is a row of `features`, int64:
TABLE, IDS_AT, NUM_IDS = 0, 1, 2  # its table; where its ids begin in `inverse`, and how many they are
OFFSETS_AT, WEIGHTS_AT, POOLING = 3, 4, 5  # where its B + 1 offsets and its weights begin, -1 = one id each, all 1
FEATURE_COLUMNS = 6
SUM, MEAN, MAX, NONE = 0, 1, 2, 3  # POOLING; NONE = a row for each id, and offsets always

_FEATURES = f"int64[:,::1], {_POSITIONS}, {_POSITIONS}, {_WEIGHTS}, int64[::1], int64[::1]"


@kernel(f"int64({_IDS}, Array(int32, 2, 'C', readonly=True), int64[:,::1], int64[::1], int64[::1], int32[::1])")
def lay_out(values_N: Ints, lengths_FB: Int32s, features: Ints, bounds_T1: Ints, ids_N: Ints, offsets: Int32s) -> int:
    """Puts the ids of unweighted features, one feature after the other, in the order of their tables, and fills in the
    columns of `features` and the offsets, of which it returns the number. Table t then has the ids from `bounds[t]` up
    to `bounds[t + 1]`. Returns -1 for lengths that are below 0 or not those of so many ids."""
    bounds_T1[:] = 0
    for f in range(lengths_FB.shape[0]):
        count = 0
        for b in range(lengths_FB.shape[1]):
            if lengths_FB[f, b] < 0:
                return -1
            count += lengths_FB[f, b]
        features[f, NUM_IDS] = count
        bounds_T1[features[f, TABLE] + 1] += count
    for t in range(bounds_T1.size - 1):
        bounds_T1[t + 1] += bounds_T1[t]
    if bounds_T1[-1] != values_N.size:
        return -1
    ends_T = bounds_T1.copy()
    at = offsets_at = 0
    for f in range(lengths_FB.shape[0]):
        count, to, single = features[f, NUM_IDS], ends_T[features[f, TABLE]], features[f, POOLING] != NONE
        ids_N[to : to + count] = values_N[at : at + count]
        features[f, IDS_AT] = to
        ends_T[features[f, TABLE]] += count
        at += count
        for b in range(lengths_FB.shape[1]):
            single &= lengths_FB[f, b] == 1
        if not single:
            features[f, OFFSETS_AT] = offsets_at
            offsets[offsets_at] = 0
            for b in range(lengths_FB.shape[1]):
                offsets[offsets_at + b + 1] = offsets[offsets_at + b] + lengths_FB[f, b]
            offsets_at += lengths_FB.shape[1] + 1
    return offsets_at


@kernel(f"void({_FEATURES}, {_VALUES}, int64, int64, int64[::1], int64[::1])")
def pool_features(
    features: Ints,
    inverse_N: Int32s,
    offsets: Int32s,
    weights: Floats,
    values_T1: Ints,
    dims_T: Ints,
    values: Floats,
    start: int,
    stop: int,
    addresses_F: Ints,
    widths_F: Ints,
) -> None:
    """`gather_rows`, `pool_rows` or `pool_max` of samples [start, stop) for every feature, (B, D) to its address; with
    `NONE` (N, D). A row begins `widths[f]` values after the one before."""
    for f in range(features.shape[0]):
        table, ids_at, num_ids = features[f, TABLE], features[f, IDS_AT], features[f, NUM_IDS]
        offsets_at, weights_at = features[f, OFFSETS_AT], features[f, WEIGHTS_AT]
        dim = dims_T[table]
        part = values[values_T1[table] : values_T1[table + 1]]
        rows_UD = part.reshape((part.size // dim, dim))
        unpooled = features[f, POOLING] == NONE
        first = int(offsets[offsets_at + start]) if unpooled else start
        last = int(offsets[offsets_at + stop]) if unpooled else stop
        out_BD = carray(pointer(addresses_F[f]), (last - first, widths_F[f]), np.float32)
        if offsets_at < 0 or unpooled:
            gather_rows(rows_UD, inverse_N[ids_at + first : ids_at + last], out_BD)
        else:
            weights_N = weights[weights_at : weights_at + num_ids] if weights_at >= 0 else weights[:0]
            bags = offsets[offsets_at + start : offsets_at + stop + 1]
            ids = inverse_N[ids_at : ids_at + num_ids]
            if features[f, POOLING] == MAX:
                pool_max(rows_UD, ids, bags, out_BD)
            else:
                pool_rows(rows_UD, ids, bags, weights_N, features[f, POOLING] == MEAN, out_BD)


@kernel(f"void({_FEATURES}, int64[::1], int64[::1], int64, int64, float32[::1])")
def add_features(
    features: Ints,
    inverse_N: Int32s,
    offsets: Int32s,
    weights: Floats,
    values_T1: Ints,
    dims_T: Ints,
    addresses_F: Ints,
    widths_F: Ints,
    start: int,
    stop: int,
    grads: Floats,
) -> None:
    """The transpose of `pool_features`, added to `grads`, in the order of features, samples and ids. Address 0 = a
    feature has no gradient. Not of bags with `MAX`: see `add_max`."""
    for f in range(features.shape[0]):
        table, ids_at, num_ids = features[f, TABLE], features[f, IDS_AT], features[f, NUM_IDS]
        offsets_at, weights_at = features[f, OFFSETS_AT], features[f, WEIGHTS_AT]
        dim = dims_T[table]
        if addresses_F[f] == 0:
            continue
        part = grads[values_T1[table] : values_T1[table + 1]]
        grad_UD = part.reshape((part.size // dim, dim))
        unpooled = features[f, POOLING] == NONE
        first = int(offsets[offsets_at + start]) if unpooled else start
        last = int(offsets[offsets_at + stop]) if unpooled else stop
        grad_BD = carray(pointer(addresses_F[f]), (last - first, widths_F[f]), np.float32)
        if offsets_at < 0 or unpooled:
            add_gathered(grad_BD, inverse_N[ids_at + first : ids_at + last], grad_UD)
        else:
            weights_N = weights[weights_at : weights_at + num_ids] if weights_at >= 0 else weights[:0]
            bags = offsets[offsets_at + start : offsets_at + stop + 1]
            add_pooled(
                grad_BD, inverse_N[ids_at : ids_at + num_ids], bags, weights_N, features[f, POOLING] == MEAN, grad_UD
            )


@kernel(f"void(int64[:,::1], {_POSITIONS}, {_POSITIONS}, int64[::1], boolean[::1], int64, int64[:,::1])")
def count_values(
    features: Ints, inverse_N: Int32s, offsets: Int32s, starts_T1: Ints, has_row_V: Bools, stop: int, counts_F2: Ints
) -> None:
    """Adds, by feature, the values of samples [0, stop) whose id has no row, and all of their values."""
    for f in range(features.shape[0]):
        ids_at, offsets_at, first = features[f, IDS_AT], features[f, OFFSETS_AT], starts_T1[features[f, TABLE]]
        count = stop if offsets_at < 0 else np.int64(offsets[offsets_at + stop])
        for n in range(ids_at, ids_at + count):
            if not has_row_V[first + inverse_N[n]]:
                counts_F2[f, 0] += 1
        counts_F2[f, 1] += count


@kernel("void(Array(uint32, 2, 'C', readonly=True), boolean[::1])")
def find_non_finite(bits_UD: npt.NDArray[np.uint32], bad_U: npt.NDArray[np.bool_]) -> None:
    """Whether a row, given as its bits, holds an infinity or a NaN: all bits of an exponent are set."""
    for u in range(bits_UD.shape[0]):
        largest = np.uint32(0)
        for d in range(bits_UD.shape[1]):
            largest = max(largest, bits_UD[u, d] & np.uint32(0x7FFFFFFF))
        bad_U[u] = largest >= np.uint32(0x7F800000)
