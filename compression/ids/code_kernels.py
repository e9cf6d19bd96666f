"""Kernels of id codes: for each section the format that is shortest, its header and bytes, and the ids back from them.

The formats are drawn in codes.py, the codes of a set in set_kernels.py.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.ids import bit_kernels as bits, set_kernels as sets

RAW, RANGE, BITMAP, RICE = 0, 1, 2, 3

PROBLEMS = 16
"""A kernel that reads returns PROBLEMS * section + problem."""
_0, _1 = np.uint64(0), np.uint64(1)
_LAST = np.uint64(2**63 - 1)
_INTS = "Array(int64, 1, 'C', readonly=True)"


@kernel(f"int64({_INTS}, {_INTS})")
def misplaced(starts_S1: Ints, ids_V: Ints) -> int:
    """The first id that is not above the one before in its section, -1 where all are; -2 for wrong starts."""
    if starts_S1.size == 0 or starts_S1[0] != 0 or starts_S1[-1] != ids_V.size:
        return -2
    for s in range(starts_S1.size - 1):
        if starts_S1[s + 1] < starts_S1[s]:
            return -2
        for i in range(starts_S1[s] + 1, starts_S1[s + 1]):
            if ids_V[i] <= ids_V[i - 1]:
                return i
    return -1


@kernel(f"void({_INTS}, {_INTS}, int64[::1], int64[::1], int64[::1])")
def choose_ids(starts_S1: Ints, ids_V: Ints, formats_S: Ints, sizes_S: Ints, widths_S: Ints) -> None:
    """The shortest format of each section, its bytes, and the width of its Rice code."""
    for s in range(starts_S1.size - 1):
        begin, end = starts_S1[s], starts_S1[s + 1]
        count = end - begin
        format_, size, width = RAW, 8 * count, 0
        if count > 0:
            span = np.uint64(ids_V[end - 1]) - np.uint64(ids_V[begin])
            origin = np.uint64(ids_V[begin]) + _1
            head = bits.varint_size(bits.zigzag(ids_V[begin]))
            if span == np.uint64(count - 1):
                if head < size:
                    format_, size = RANGE, head
            else:
                if span < np.uint64(8 * size):
                    bitmap = head + sets.whole_bytes(np.int64(span))  # type: ignore[arg-type]
                    if bitmap < size:
                        format_, size = BITMAP, bitmap
                rice_width, num_bits = sets.rice_size(ids_V, begin + 1, end, origin)
                if head + 1 + sets.whole_bytes(num_bits) < size:
                    format_, size, width = RICE, head + 1 + sets.whole_bytes(num_bits), rice_width
        formats_S[s], sizes_S[s], widths_S[s] = format_, size, width


@kernel(f"void({_INTS}, {_INTS}, int64[::1], int64[::1], int64[::1], uint8[::1])")
def write_ids(starts_S1: Ints, ids_V: Ints, formats_S: Ints, sizes_S: Ints, widths_S: Ints, area: Bytes) -> None:
    """The codes that were chosen, one after the other, into an area of zeros."""
    start = 0
    for s in range(starts_S1.size - 1):
        at, start = start, start + sizes_S[s]
        begin, end, format_, width = starts_S1[s], starts_S1[s + 1], formats_S[s], widths_S[s]
        if format_ == RAW:
            for i in range(begin, end):
                bits.put_bits(area, 8 * at, np.uint64(ids_V[i]), 64)
                at += 8
            continue
        origin = np.uint64(ids_V[begin]) + _1
        at = bits.put_varint(area, at, bits.zigzag(ids_V[begin]))
        if format_ == BITMAP:
            sets.write_bitmap(area, at, ids_V, begin + 1, end, origin)
        elif format_ == RICE:
            area[at] = width
            sets.write_rice(area, at + 1, ids_V, begin + 1, end, origin, width)


@kernel("int64(int64[::1], int64[::1], int64[::1], int64, int64)")
def check_ids(formats_S: Ints, rows_S: Ints, sizes_S: Ints, size: int, limit: int) -> int:
    """What is wrong before a byte is looked at; -1 where nothing is, -2 for bytes of no section. Then the rows are at
    most `limit`, and those of each section but a RANGE at most 8 for a byte and one."""
    at = total = 0
    for s in range(rows_S.size):
        problem = sets.OK
        count, length, format_ = rows_S[s], sizes_S[s], formats_S[s]
        if format_ < RAW or format_ > RICE:
            problem = sets.UNKNOWN
        elif count < 0 or count > limit - total:
            problem = sets.LIMIT
        elif length < 0 or length > size - at:
            problem = sets.SHORT
        elif format_ == RAW and ((length & 7) != 0 or (length >> 3) != count):
            problem = sets.SHORT if (length >> 3) < count else sets.LONG
        elif format_ != RANGE and count - 1 > 8 * length:
            problem = sets.SHORT
        if problem != sets.OK:
            return PROBLEMS * s + problem
        at += length
        total += count
    return -1 if at == size else -2


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64[::1], int64)")
def read_raw(area: Bytes, at: int, end: int, count: int, out: Ints, to: int) -> int:
    for i in range(count):
        out[to + i] = np.int64(bits.load(area, at + 8 * i, end))
        if i > 0 and out[to + i] <= out[to + i - 1]:
            return sets.DISORDER
    return sets.OK


@kernel("int64(int64, int64, int64, uint64, int64[::1], int64)")
def read_range(at: int, end: int, count: int, room: np.uint64, out: Ints, to: int) -> int:
    if at != end:
        return sets.LONG
    if np.uint64(count - 1) > room:
        return sets.BEYOND
    for i in range(1, count):
        out[to + i] = out[to] + i
    return sets.OK


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, int64[::1], int64)")
def read_section(area: Bytes, at: int, end: int, format_: int, count: int, out: Ints, to: int) -> int:
    """Fills out[to:to + count] with a section's ids. Returns OK or what is wrong."""
    if format_ == RAW:
        return read_raw(area, at, end, count, out, to)
    if count == 0:
        return sets.COUNT
    number, at = bits.get_varint(area, at, end)
    if at < 0:
        return sets.SHORT if at == bits.ENDED else sets.HEADER
    first = bits.unzigzag(number)
    out[to] = first
    origin, room = np.uint64(first) + _1, _LAST - np.uint64(first)
    if format_ == RANGE:
        return read_range(at, end, count, room, out, to)
    if format_ == BITMAP:
        if at < end and area[end - 1] == 0:
            return sets.LONG
        return sets.read_bitmap(area, at, end, count - 1, room, origin, out, to + 1)
    if at == end:
        return sets.SHORT
    width: int = np.int64(area[at])  # type: ignore[assignment]
    if width > 63:
        return sets.HEADER
    return sets.read_rice(area, at + 1, end, count - 1, room, origin, width, out, to + 1)


@kernel("int64(int64[::1], int64[::1], int64[::1], Array(uint8, 1, 'C', readonly=True), int64[::1])")
def read_ids(formats_S: Ints, rows_S: Ints, sizes_S: Ints, area: Bytes, out: Ints) -> int:
    """The ids of all sections, which `check_ids` has passed, into `out`, which is as large as they are. -1, or what is
    wrong."""
    end = to = 0
    for s in range(rows_S.size):
        at, end = end, end + sizes_S[s]
        problem = read_section(area, at, end, formats_S[s], rows_S[s], out, to)
        if problem != sets.OK:
            return PROBLEMS * s + problem
        to += rows_S[s]
    return -1
