"""Kernels of subset codes: which positions of [0, universe) are there, for many sections at once.

Both ends know each section's universe and how many positions there are. The formats are drawn in codes.py.
"""
# S = sections, K = positions of all sections

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.ids.code_kernels import PROBLEMS
from shardkeep.compression.ids.set_kernels import (
    BEYOND,
    COUNT,
    HEADER,
    LIMIT,
    LONG,
    OK,
    PADDING,
    SHORT,
    UNKNOWN,
    read_bitmap,
    read_rice,
    rice_size,
    whole_bytes,
    write_bitmap,
    write_rice,
)

ALL, NONE, MASK, RICE_IN, RICE_OUT = 16, 17, 18, 19, 21
_0 = np.uint64(0)


@kernel("void(Array(int64, 1, 'C', readonly=True), int64, int64, int64[::1])")
def fill_absent(positions: Ints, begin: int, end: int, absent: Ints) -> None:
    """Those of [0, universe) that are not in positions[begin:end]; `absent` is as large as they are."""
    to, next_ = 0, 0
    for i in range(begin, end):
        for absentee in range(next_, positions[i]):
            absent[to] = absentee
            to += 1
        next_ = positions[i] + 1
    for i in range(absent.size - to):
        absent[to + i] = next_ + i


@kernel(
    "int64(Array(int64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1],"
    " int64[::1], int64[::1])"
)
def choose_subsets(
    starts_S1: Ints, positions_K: Ints, universe_S: Ints, formats_S: Ints, sizes_S: Ints, widths_S: Ints
) -> int:
    """The shortest format of each section, its bytes, and the width of its Rice code. Returns -1, or the
    first section with a position outside of its universe."""
    for s in range(universe_S.size):
        begin, end, universe = starts_S1[s], starts_S1[s + 1], universe_S[s]
        count = end - begin
        if universe < 0 or (count > 0 and (positions_K[begin] < 0 or positions_K[end - 1] >= universe)):
            return s
        format_, size, width = MASK, whole_bytes(universe), 0
        if count == universe:
            format_, size = ALL, 0
        elif count == 0:
            format_, size = NONE, 0
        else:
            rice_width, bits = rice_size(positions_K, begin, end, _0)
            if 1 + whole_bytes(bits) < size:
                format_, size, width = RICE_IN, 1 + whole_bytes(bits), rice_width
            if 2 * count > universe:
                absent = np.empty(universe - count, np.int64)
                fill_absent(positions_K, begin, end, absent)
                rice_width, bits = rice_size(absent, 0, absent.size, _0)
                if 1 + whole_bytes(bits) < size:
                    format_, size, width = RICE_OUT, 1 + whole_bytes(bits), rice_width
        formats_S[s], sizes_S[s], widths_S[s] = format_, size, width
    return -1


@kernel("void(uint8[::1], int64, Array(int64, 1, 'C', readonly=True), int64, int64, int64)")
def write_one(area: Bytes, at: int, positions: Ints, begin: int, end: int, width: int) -> None:
    area[at] = width
    write_rice(area, at + 1, positions, begin, end, _0, width)


@kernel(
    "void(Array(int64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1],"
    " int64[::1], int64[::1], uint8[::1])"
)
def write_subsets(
    starts_S1: Ints,
    positions_K: Ints,
    universe_S: Ints,
    formats_S: Ints,
    sizes_S: Ints,
    widths_S: Ints,
    area: Bytes,
) -> None:
    """The codes that were chosen, one after the other, into an area of zeros."""
    start = 0
    for s in range(universe_S.size):
        at, start = start, start + sizes_S[s]
        begin, end, format_, width = starts_S1[s], starts_S1[s + 1], formats_S[s], widths_S[s]
        if format_ == MASK:
            write_bitmap(area, at, positions_K, begin, end, _0)
        elif format_ == RICE_IN:
            write_one(area, at, positions_K, begin, end, width)
        elif format_ == RICE_OUT:
            absent = np.empty(universe_S[s] - (end - begin), np.int64)
            fill_absent(positions_K, begin, end, absent)
            write_one(area, at, absent, 0, absent.size, width)


@kernel("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64, int64)")
def check_subsets(formats_S: Ints, rows_S: Ints, sizes_S: Ints, universe_S: Ints, size: int, limit: int) -> int:
    """What is wrong before a byte is looked at; -1 where nothing is, -2 for bytes of no section. Then the positions are
    at most `limit`, and what a section's bytes tell one by one is at most 8 a byte."""
    at = total = 0
    for s in range(rows_S.size):
        problem = OK
        count, length, format_, universe = rows_S[s], sizes_S[s], formats_S[s], universe_S[s]
        if format_ not in (ALL, NONE, MASK, RICE_IN, RICE_OUT):
            problem = UNKNOWN
        elif count < 0 or count > limit - total:
            problem = LIMIT
        elif length < 0 or length > size - at:
            problem = SHORT
        elif count > universe or (format_ == ALL and count != universe) or (format_ == NONE and count != 0):
            problem = COUNT
        elif format_ <= MASK:
            expected = whole_bytes(universe) if format_ == MASK else 0
            if length != expected:
                problem = SHORT if length < expected else LONG
        else:
            coded = count if format_ == RICE_IN else universe - count
            if coded == 0:
                problem = COUNT
            elif coded > 8 * length:
                problem = SHORT
        if problem != OK:
            return PROBLEMS * s + problem
        at += length
        total += count
    return -1 if at == size else -2


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64[::1])")
def read_one(area: Bytes, at: int, end: int, universe: int, out: Ints) -> int:
    """The reverse of `write_one`: fills all of `out`, which is not empty."""
    width: int = np.int64(area[at])  # type: ignore[assignment]
    if width > 63:
        return HEADER
    return read_rice(area, at + 1, end, out.size, np.uint64(universe), _0, width, out, 0)


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, int64, int64[::1], int64)")
def read_subset(area: Bytes, at: int, end: int, format_: int, count: int, universe: int, out: Ints, to: int) -> int:
    """Fills out[to:to + count] with a section's positions. Returns OK or what is wrong."""
    if format_ == ALL:
        for i in range(count):
            out[to + i] = i
        return OK
    if format_ == NONE:
        return OK
    if format_ == MASK:
        problem = read_bitmap(area, at, end, count, np.uint64(universe), _0, out, to)
        return PADDING if problem == BEYOND else problem
    inside = format_ == RICE_IN
    coded = out[to : to + count] if inside else np.empty(universe - count, np.int64)
    problem = read_one(area, at, end, universe, coded)
    if problem == OK and not inside:
        fill_absent(coded, 0, coded.size, out[to : to + count])
    return problem


@kernel("int64(int64[::1], int64[::1], int64[::1], int64[::1], Array(uint8, 1, 'C', readonly=True), int64[::1])")
def read_subsets(formats_S: Ints, rows_S: Ints, sizes_S: Ints, universe_S: Ints, area: Bytes, out: Ints) -> int:
    """The positions of all sections, which `check_subsets` has passed, into `out`, which is as large as they are. -1,
    or what is wrong."""
    end = to = 0
    for s in range(rows_S.size):
        at, end = end, end + sizes_S[s]
        problem = read_subset(area, at, end, formats_S[s], rows_S[s], universe_S[s], out, to)
        if problem != OK:
            return PROBLEMS * s + problem
        to += rows_S[s]
    return -1
