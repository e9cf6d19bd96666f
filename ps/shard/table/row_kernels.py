"""Kernels of a shard's rows: initial values, gathering, sums, digest. The index has its own (index_kernels.py).

Records and blocks are as index_kernels.py has them.
"""
# U = unique ids, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from shardkeep.base.array_kernels import pointer
from shardkeep.base.arrays import Ids, Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix
from shardkeep.ps.shard.table.layout_kernels import prefetch_record, record, slots_of, start_of, weights_of

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""Numbers of the initializers."""

MARKED = np.uint32(0xFFFFFFFF)
"""The mark of a new row of fewer than 32 bits a value: as float32, fp16 or bf16 a NaN that no update gives."""

_LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_UNIT24 = 2.0**-24
_UNIT32 = 2.0**-32


@kernel("void(uint64, int64, int64, float32, float32, int64, float32[::1])")
def initial_values(
    key: np.uint64, id_: int, initializer: int, first: np.float32, second: np.float32, dim: int, out: Rows
) -> None:
    """Initial weights of a row into out[:dim]: one 64-bit hash of (table key, id, pair) per two columns.

    `initializer`: its number in initializers.py. `first`, `second`: the value of CONSTANT; low and high of UNIFORM,
    which has 24 random bits; mean and standard deviation of NORMAL, by Box and Muller (1958). All arithmetic is in
    float64, so that a value is rounded once. An unknown number leaves `out` as it is."""
    if initializer == CONSTANT:
        for d in range(dim):
            out[d] = first
        return
    low, width, deviation = np.float64(first), np.float64(second) - np.float64(first), np.float64(second)
    base = mix(key ^ mix(np.uint64(id_) + GOLDEN))
    for pair in range((dim + 1) // 2):
        bits = mix(base + np.uint64(pair + 1) * GOLDEN)
        if initializer == UNIFORM:
            one = low + np.float64(bits >> np.uint64(40)) * _UNIT24 * width
            other = low + np.float64((bits >> np.uint64(8)) & np.uint64(0xFFFFFF)) * _UNIT24 * width
        elif initializer == NORMAL:
            radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _32) + 1.0) * _UNIT32)) * deviation
            angle = 2.0 * np.pi * (np.float64(bits & _LOW32) * _UNIT32)
            one, other = radius * np.cos(angle), radius * np.sin(angle)
            if low != 0.0:  # -0.0 + 0.0 would be 0.0
                one, other = one + low, other + low
        else:
            return
        out[2 * pair] = np.float32(one)
        if 2 * pair + 1 < dim:
            out[2 * pair + 1] = np.float32(other)


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int64, uint64, int64, float32, float32, float32[:,::1])")
def gather(
    ids_U: Ids,
    slots_U: Ints,
    addresses: Ints,
    shift: int,
    width: int,
    key: np.uint64,
    initializer: int,
    first: np.float32,
    second: np.float32,
    rows_UD: Rows,
) -> None:
    """Weights of rows; the initial value where the slot is -1."""
    dim = rows_UD.shape[1]
    for i in range(ids_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        if slots_U[i] < 0:
            initial_values(key, ids_U[i], initializer, first, second, dim, rows_UD[i])
        else:
            weights = weights_of(record(addresses, shift, width, slots_U[i]), dim)
            for d in range(dim):
                rows_UD[i, d] = weights[d]


@kernel(
    "void(int64[::1], int64[::1], int64, int64[::1], int64, int64, uint64, int64, float32, float32, int64, float32)"
)
def initialise(
    ids_U: Ids,
    slots_U: Ints,
    first_new: int,
    addresses: Ints,
    shift: int,
    width: int,
    key: np.uint64,
    initializer: int,
    first: np.float32,
    second: np.float32,
    dim: int,
    slot_value: np.float32,
) -> None:
    """Initial weights and slots of the records that were just added (slots from `first_new` on)."""
    for i in range(ids_U.size):
        if slots_U[i] >= first_new:
            row = record(addresses, shift, width, slots_U[i])
            initial_values(key, ids_U[i], initializer, first, second, dim, weights_of(row, dim))
            slots_of(row, dim)[:] = slot_value


@kernel("void(int64[::1], int64, int64[::1], int64, int64, int64)")
def mark_new(slots_U: Ints, first_new: int, addresses: Ints, shift: int, width: int, mark: int) -> None:
    """Marks the records that were just added (slots from `first_new` on) as new, at byte `mark`: their values follow
    from the id until they are first written."""
    for i in range(slots_U.size):
        if slots_U[i] >= first_new:
            at = start_of(addresses, shift, width, slots_U[i]) + mark
            carray(pointer(at), (1,), np.uint32)[0] = MARKED


@kernel("void(int64[::1], int64, int64, int64[::1], int64, float32[:,::1])")
def write_words(addresses: Ints, shift: int, width: int, slots_U: Ints, first: int, in_UK: Rows) -> None:
    """`in_UK` into words [first, first + K) of records."""
    for i in range(slots_U.size):
        row = record(addresses, shift, width, slots_U[i])
        for k in range(in_UK.shape[1]):
            row[first + k] = in_UK[i, k]


@kernel("UniTuple(uint64, 2)(int64[::1], int64, int64, int64, int64, uint64)")
def digest(
    addresses: Ints, shift: int, width: int, count: int, used: int, key: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Sum modulo 2**128 (low, high half) of a 128-bit mix of every record's first `used` words.

    The mix of a record: two chains over its words with different keys, closed over each other."""
    low, high = np.uint64(0), np.uint64(0)
    for slot in range(count):
        row = record(addresses, shift, width, slot).view(np.uint32)
        a, b = mix(key), mix(key ^ GOLDEN)
        for w in range(used):
            a = mix((a ^ np.uint64(row[w])) + GOLDEN)
            b = (b ^ np.uint64(row[w])) * np.uint64(0xD6E8FEB86659FD93)
            b = b ^ (b >> _32)
        a, b = mix(a + b), mix(b ^ (a * GOLDEN))
        low += a
        high += b + np.uint64(low < a)
    return low, high


@kernel("int64(int64[::1], float32[:,::1], int64[::1], float32[:,::1], int64[::1], float32[:,::1])")
def merge_sum(ids_A: Ids, grad_AD: Rows, ids_B: Ids, grad_BD: Rows, ids_U: Ids, grad_UD: Rows) -> int:
    """Merges two sorted lists of unique ids, adding first + second where both have an id. Returns the length."""
    a = b = count = 0
    while a < ids_A.size or b < ids_B.size:
        from_a = a < ids_A.size and (b == ids_B.size or ids_A[a] <= ids_B[b])
        from_b = b < ids_B.size and (a == ids_A.size or ids_B[b] <= ids_A[a])
        ids_U[count] = ids_A[a] if from_a else ids_B[b]
        for d in range(grad_UD.shape[1]):
            if from_a and from_b:
                grad_UD[count, d] = grad_AD[a, d] + grad_BD[b, d]
            elif from_a:
                grad_UD[count, d] = grad_AD[a, d]
            else:
                grad_UD[count, d] = grad_BD[b, d]
        a += from_a
        b += from_b
        count += 1
    return count


@kernel("int64(float32[:,::1], boolean[::1])")
def finite_rows(grad_UD: Rows, finite_U: npt.NDArray[np.bool_]) -> int:
    """Marks the rows without inf or nan; returns how many there are."""
    count = 0
    for i in range(grad_UD.shape[0]):
        good = True
        for d in range(grad_UD.shape[1]):
            good = good & np.isfinite(grad_UD[i, d])
        finite_U[i] = good
        count += good
    return count
