"""Kernels of rows with fewer than 32 bits a value: records as blocks of float32 records, and back.

A table's `precision`: that of the weights in its lower 2 bits, of the slots above (layout.py). A row that was added
but never written has a mark instead of values, which are computed when it is read: the first update rounds once. A
value is rounded to one of its two neighbours, with it as the mean over all random numbers. Values beyond the range, and
NaN, become the largest number.
"""
# U = unique ids, K = rows of a block, W = words of a block's record, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import boolean, float32, int32, int64, uint32, uint64, void

from shardkeep.base.array_kernels import bits_of, float_of, pointer
from shardkeep.base.arrays import Ints, Rows, UInt64s
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.values.rounding_kernels import random_bits
from shardkeep.ps.server.table.descriptor_kernels import INTS, ROWS, TABLE, Descriptor
from shardkeep.ps.server.table.initializers.initial_kernels import initial_values
from shardkeep.ps.server.table.layout_kernels import (
    BF16,
    FIRST_WEIGHT,
    FP16,
    FP32,
    INT8,
    id_of,
    prefetch_record,
    start_of,
    words_of,
)
from shardkeep.ps.server.table.row_kernels import MARKED

_PRECISION, _STATE_SHIFT = 3, 2
_SIGN16, _REST16, _SIZE32 = np.uint32(0x8000), np.uint32(0x7FFF), np.uint32(0x7FFFFFFF)
_13, _16, _31, _NONE = np.uint32(13), np.uint32(16), np.uint32(31), np.uint32(0)
_SPREAD = np.float32(2.0**112)  # between the biases of the exponents of fp16 and float32
_LARGEST16, _LARGEST_BRAIN, _LARGEST32 = np.uint32(0x477FE000), np.uint32(0x7F7F0000), np.uint32(0x7F7FFFFF)
_REBIAS16, _LEAST16 = np.uint32(112 << 10), np.uint32(0x38800000)
_PER_LEVEL, _PER_SUBNORMAL16 = np.float32(2.0**24), np.float32(2.0**45)
_LEVELS, _ONE = np.float32(127.0), np.float32(1.0)
_TINY = np.uint32(0x0D800000)  # 2**-100: the inverse of a smaller scale would be infinite
_ALL, _HALF = np.uint32(0xFFFFFFFF), np.uint32(0x80000000)


@kernel(int32(float32, uint32))
def stochastic(value: np.float32, random: np.uint32) -> np.int32:
    """One of the two integers around the value, of at most 127 either way, with it as the mean over all random numbers,
    except what the value has beyond 2**-24, which is cut off. An integer stays.

    Value and random number are added in 2**-24ths and rounded down, which fits into 32 bits at 127, too."""
    fixed = np.int32(np.float32(value * _PER_LEVEL))
    return np.int32(np.int32(fixed + np.int32(random >> np.uint32(8))) >> np.int32(24))


@kernel(uint32(float32, uint32))
def half_stochastic(size: np.float32, random: np.uint32) -> np.uint32:
    """Bits, without a sign, of one of the two float16 around `size`, from 0 to the largest, with it as the mean over
    all random numbers."""
    bits = np.uint32(bits_of(size))
    normal = np.uint32(np.uint32(np.uint32(bits + np.uint32(random >> np.uint32(19))) >> _13) - _REBIAS16)
    small = size if bits < _LEAST16 else np.float32(0.0)
    fixed = np.uint32(np.int32(np.float32(small * _PER_SUBNORMAL16)))  # in 2**-21ths of a subnormal: at most 2**10
    subnormal = np.uint32(np.uint32(fixed + np.uint32(random >> np.uint32(11))) >> np.uint32(21))
    return subnormal if bits < _LEAST16 else normal


@kernel(void(TABLE, INTS, int64, int64, int64, ROWS, int64))
def read_rows(
    table: Descriptor, slots_U: Ints, begin: int, end: int, num_slots: int, block_KW: Rows, column: int
) -> None:
    """Weights and slots of the rows in slots[begin:end) as float32, from `column` of the block on. Skips slots -1; what
    it gives for a new row has no meaning."""
    blocks, dim = table.blocks, table.dim
    rows, state = table.packed.precision & _PRECISION, table.packed.precision >> _STATE_SHIFT
    first_slot = 4 * (FIRST_WEIGHT + words_of(rows, dim))
    for i in range(begin, end):
        prefetch_record(blocks, slots_U, i)
        if slots_U[i] < 0:
            continue
        start = start_of(blocks, slots_U[i])
        at = start + 4 * FIRST_WEIGHT
        weights = block_KW[i - begin, column : column + dim]
        if rows == FP16:
            halves = carray(pointer(at), (dim,), np.uint16)
            for d in range(dim):
                half = np.uint32(halves[d])
                size = np.float32(float_of(np.uint32(np.uint32(half & _REST16) << _13)) * _SPREAD)
                weights[d] = float_of(np.uint32(bits_of(size)) | np.uint32(np.uint32(half & _SIGN16) << _16))
        elif rows == BF16:
            halves = carray(pointer(at), (dim,), np.uint16)
            for d in range(dim):
                weights[d] = float_of(np.uint32(np.uint32(halves[d]) << _16))
        elif rows == INT8:
            codes = carray(pointer(at), (dim,), np.int8)
            scale = carray(pointer(start + first_slot - 4), (1,), np.float32)[0]
            for d in range(dim):
                weights[d] = scale * np.float32(codes[d])
        else:
            words = carray(pointer(at), (dim,), np.float32)
            for d in range(dim):
                weights[d] = words[d]
        slots = block_KW[i - begin, column + dim : column + dim + num_slots]
        if state == FP32:
            words = carray(pointer(start + first_slot), (num_slots,), np.float32)
            for s in range(num_slots):
                slots[s] = words[s]
        else:
            halves = carray(pointer(start + first_slot), (num_slots,), np.uint16)
            for s in range(num_slots):
                slots[s] = float_of(np.uint32(np.uint32(halves[s]) << _16))


@kernel(void(TABLE, INTS, int64, int64, ROWS, uint64[::1], boolean))
def write_rows(
    table: Descriptor, slots_U: Ints, begin: int, end: int, block_KW: Rows, keys_K: UInt64s, to_nearest: bool
) -> None:
    """The rows of a block into slots[begin:end): rounded by random numbers of a row's key and the column, slot s being
    column D + s, or to the nearest value. The scale of int8 is the largest weight / 127."""
    blocks, dim, num_slots = table.blocks, table.dim, table.packed.num_slots
    rows, state = table.packed.precision & _PRECISION, table.packed.precision >> _STATE_SHIFT
    first_slot = 4 * (FIRST_WEIGHT + words_of(rows, dim))
    keep = _NONE if to_nearest else _ALL
    add = _HALF if to_nearest else _NONE
    halves_K = keys_K.view(np.uint32)  # of key >> 32 numba makes 64 bits, which vectors would keep
    for i in range(begin, end):
        low, high = halves_K[2 * (i - begin)], halves_K[2 * (i - begin) + 1]
        start = start_of(blocks, slots_U[i])
        at = start + 4 * FIRST_WEIGHT
        weights = block_KW[i - begin, FIRST_WEIGHT : FIRST_WEIGHT + dim]
        if rows == FP16:
            halves = carray(pointer(at), (dim,), np.uint16)
            for d in range(dim):
                random = np.uint32(np.uint32(random_bits(low, high, np.uint32(d)) & keep) | add)
                bits = np.uint32(bits_of(weights[d]))
                size = np.float32(float_of(np.uint32(min(np.uint32(bits & _SIZE32), _LARGEST16))))
                code = half_stochastic(size, random)
                halves[d] = np.uint32(np.uint32(np.uint32(bits >> _16) & _SIGN16) | code)
            if dim & 1:  # the mark of a new row may be there
                carray(pointer(at + 2 * dim), (1,), np.uint16)[0] = 0
        elif rows == BF16:
            halves = carray(pointer(at), (dim,), np.uint16)
            for d in range(dim):
                random = np.uint32(np.uint32(random_bits(low, high, np.uint32(d)) & keep) | add)
                bits = np.uint32(bits_of(weights[d]))
                magnitude = np.uint32(min(np.uint32(bits & _SIZE32), _LARGEST_BRAIN))
                code = np.uint32(np.uint32(magnitude + np.uint32(random >> _16)) >> _16)
                halves[d] = np.uint32(np.uint32(np.uint32(bits >> _16) & _SIGN16) | code)
            if dim & 1:
                carray(pointer(at + 2 * dim), (1,), np.uint16)[0] = 0
        elif rows == INT8:
            most = _NONE
            for d in range(dim):
                most = np.uint32(max(most, np.uint32(np.uint32(bits_of(weights[d])) & _SIZE32)))
            most = np.uint32(min(most, _LARGEST32))
            largest = np.float32(float_of(most)) if most > _TINY else np.float32(0.0)
            inverse = _LEVELS / largest if most > _TINY else np.float32(0.0)
            carray(pointer(start + first_slot - 4), (1,), np.float32)[0] = largest / _LEVELS
            codes = carray(pointer(at), (dim,), np.int8)
            for d in range(dim):
                random = np.uint32(np.uint32(random_bits(low, high, np.uint32(d)) & keep) | add)
                level = np.float32(weights[d] * inverse)
                level = level if level < _LEVELS else _LEVELS
                level = level if level > -_LEVELS else -_LEVELS
                codes[d] = np.int8(stochastic(level, random))
        else:
            words = carray(pointer(at), (dim,), np.float32)
            for d in range(dim):
                words[d] = weights[d]
        slots = block_KW[i - begin, FIRST_WEIGHT + dim : FIRST_WEIGHT + dim + num_slots]
        if state == FP32:
            words = carray(pointer(start + first_slot), (num_slots,), np.float32)
            for s in range(num_slots):
                words[s] = slots[s]
        else:
            halves = carray(pointer(start + first_slot), (num_slots,), np.uint16)
            for s in range(num_slots):
                random = np.uint32(np.uint32(random_bits(low, high, np.uint32(dim + s)) & keep) | add)
                bits = np.uint32(bits_of(slots[s]))
                magnitude = np.uint32(min(np.uint32(bits & _SIZE32), _LARGEST_BRAIN))
                code = np.uint32(np.uint32(magnitude + np.uint32(random >> _16)) >> _16)
                halves[s] = np.uint32(np.uint32(np.uint32(bits >> _16) & _SIGN16) | code)


@kernel(void(TABLE, INTS, int64, int64, ROWS))
def start_new(table: Descriptor, slots_U: Ints, begin: int, end: int, block_KW: Rows) -> None:
    """Initial weights and slots, in float32, of the rows among slots[begin:end) that are marked as new."""
    blocks, start, dim = table.blocks, table.start, table.dim
    for i in range(begin, end):
        at = start_of(blocks, slots_U[i]) + table.packed.mark
        if carray(pointer(at), (1,), np.uint32)[0] == MARKED:
            row, id_ = block_KW[i - begin], id_of(blocks, slots_U[i])
            initial_values(start, id_, dim, row[FIRST_WEIGHT : FIRST_WEIGHT + dim])
            for s in range(table.packed.num_slots):
                row[FIRST_WEIGHT + dim + s] = table.optimizer.slot_value
