"""Kernels of messages: header and directory in few bytes and back, where the parts lie, the order of ids.

The header is a byte of version and kind, then varints (LEB128): generation, rank, step, value, number of sections.

A directory is a byte of flags, then bits, little end first: of each column its lead and, unless a flag says that they
are all 0, the order of the codes (4 bits) and a code for each section. Codes are exponential Golomb, leads of order 3.

    column           lead                       code of a section
    tables           the first section's        how many tables are left out before it
    rows             the fewest                 how many more
    id formats       the first section's tag    the difference, zigzag
    value formats    the first section's tag    the difference, zigzag
    bytes of ids     bytes of a row             how many more or fewer than the rows have, zigzag
    bytes of values  bytes of a row             how many more or fewer than the rows have, zigzag

The codes of rows are never left out, so a message has no more sections than bits. A message without sections has no
directory.
"""
# S = sections of a message

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.ids.bit_kernels import (
    bit_length,
    get_bits,
    get_varint,
    load,
    lowest_bit,
    put_bits,
    put_varint,
    unzigzag,
    varint_size,
    zigzag,
)

Columns = npt.NDArray[np.int64]

# Rows of the columns, each with room for S + 1 numbers. A directory has the first six; a flag is 1 << column.
TABLES, ROWS, ID_FORMATS, VALUE_FORMATS, ID_BYTES, VALUE_BYTES = 0, 1, 2, 3, 4, 5
IDS_AT, VALUES_AT = 6, 7  # where each section's part starts, and where the last one's ends
NUM_COLUMNS = 8
KIND, GENERATION, RANK, STEP, VALUE, SECTIONS, NUM_FIELDS = 0, 1, 2, 3, 4, 5, 6
"""Numbers of a header."""

ALL_SHORT = 1 << TABLES | 1 << ID_FORMATS | 1 << VALUE_FORMATS | 1 << ID_BYTES | 1 << VALUE_BYTES
BROKEN, TOO_LONG, PADDING = -1, -2, -3
"""What readers return in place of a place: numbers that are none, parts beyond all there is, set padding."""
MOST, MAX_FORMAT = 2**32 - 1, 255
"""The largest table and number of rows, the largest tag of a format."""
MAX_WIDTH = 1 << 20
"""The most bytes of a row that a lead is."""
LEAD_ORDER, MAX_ORDER, MAX_CODE_BITS = 3, 15, 56


@kernel("int64(int64[::1], uint8[::1])")
def put_header(fields: Columns, area: Bytes) -> int:
    """Writes a header; into an empty area nothing. Returns where it ends."""
    at = 1
    for i in range(GENERATION, NUM_FIELDS):
        if area.size:
            put_varint(area, at, np.uint64(fields[i]))
        at += varint_size(np.uint64(fields[i]))
    if area.size:
        area[0] = fields[KIND]
    return at


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64[::1])")
def read_header(buffer: Bytes, fields: Columns) -> int:
    """Fills in the fields. Returns where the header ends, or BROKEN."""
    at = 1
    if buffer.size == 0:
        return BROKEN
    fields[KIND] = buffer[0]
    for i in range(GENERATION, NUM_FIELDS):
        number, at = get_varint(buffer, at, buffer.size)
        if at < 0:
            return BROKEN
        fields[i] = np.int64(number)
        if i != STEP and i != VALUE and (fields[i] < 0 or fields[i] > MOST):
            return BROKEN
    return at


@kernel("int64(uint8[::1], int64, uint64, int64)")
def put_code(area: Bytes, bit: int, x: np.uint64, order: int) -> int:
    """Writes a code where zeros are; into an empty area nothing. Returns the bit behind it."""
    quotient = (x >> np.uint64(order)) + np.uint64(1)
    zeros = bit_length(quotient) - 1
    if area.size:
        high = quotient ^ (np.uint64(1) << np.uint64(zeros))
        low = x & ((np.uint64(1) << np.uint64(order)) - np.uint64(1))
        word = np.uint64(1) | high << np.uint64(1) | low << np.uint64(zeros + 1)
        put_bits(area, bit + zeros, word, zeros + 1 + order)
    return bit + 2 * zeros + 1 + order


@kernel("Tuple((int64, int64))(Array(uint8, 1, 'C', readonly=True), int64, int64)")
def get_code(buffer: Bytes, bit: int, order: int) -> tuple[int, int]:
    """The number of a code, and the bit behind it or BROKEN."""
    zeros = lowest_bit(load(buffer, bit >> 3, buffer.size) >> np.uint64(bit & 7))  # beyond the end there are only zeros
    bit += zeros + 1
    if zeros + order > MAX_CODE_BITS or bit + zeros + order > 8 * buffer.size:
        return 0, BROKEN
    word: int = np.int64(get_bits(buffer, bit, zeros + order, buffer.size))  # type: ignore[assignment]
    high = (1 << zeros) - 1 + (word & (1 << zeros) - 1)
    return high << order | word >> zeros, bit + zeros + order


@kernel("int64(int64[:,::1], int64)")
def lead_of(columns: Columns, column: int) -> int:
    """The lead of a column."""
    lead: int = columns[column, 0]
    if column == ROWS:
        lead = columns[ROWS, :-1].min()
    elif column >= ID_BYTES:
        for s in range(columns.shape[1] - 1):
            if columns[ROWS, s] > 0:
                lead = columns[column, s] // columns[ROWS, s]
                return lead if lead <= MAX_WIDTH else 0
        return 0
    return lead


@kernel("uint64(int64[:,::1], int64, int64, int64)")
def number_of(columns: Columns, column: int, lead: int, s: int) -> np.uint64:
    """The number that represents a section in a column."""
    number = columns[column, s]
    if column == TABLES:
        return np.uint64(number - columns[TABLES, s - 1] - 1 if s > 0 else 0)
    if column == ROWS:
        return np.uint64(number - lead)
    return zigzag(number - (lead * columns[ROWS, s] if column >= ID_BYTES else lead))


@kernel("int64(int64[:,::1], uint8[::1], int64)")
def put_directory(columns: Columns, area: Bytes, bit: int) -> int:
    """Writes a directory where zeros are; into an empty area nothing. Returns the bit behind it."""
    count = columns.shape[1] - 1
    flags, flags_at = 0, bit
    bit += 8
    for column in range(TABLES, VALUE_BYTES + 1):
        lead, total = lead_of(columns, column), np.uint64(0)
        for s in range(count):
            total += min(number_of(columns, column, lead, s), np.uint64(1 << 40))  # cannot overflow to 0
        bit = put_code(area, bit, np.uint64(lead), LEAD_ORDER)
        if total == 0 and column != ROWS:
            flags |= 1 << column
            continue
        order = min(max(bit_length(total // np.uint64(count)) - 1, 0), MAX_ORDER)
        if area.size:
            put_bits(area, bit, np.uint64(order), 4)
        bit += 4
        for s in range(count):
            bit = put_code(area, bit, number_of(columns, column, lead, s), order)
    if area.size:
        area[flags_at >> 3] = flags
    return bit


@kernel("int64(int64[:,::1], int64)")
def place_parts(columns: Columns, at: int) -> int:
    """Fills in where the parts lie behind a directory that ends at `at`. Returns the message's length.

    Raw ids and raw values, which have format 0, begin at a multiple of 8 bytes."""
    count = columns.shape[1] - 1
    for formats, sizes, starts in ((ID_FORMATS, ID_BYTES, IDS_AT), (VALUE_FORMATS, VALUE_BYTES, VALUES_AT)):
        if columns[sizes, :count].any() and not columns[formats, :count].any():
            at = (at + 7) & ~7
        for s in range(count):
            columns[starts, s] = at
            at += columns[sizes, s]
        columns[starts, count] = at
    return at


@kernel("int64(int64[::1], int64[:,::1], uint8[::1])")
def place(fields: Columns, columns: Columns, nothing: Bytes) -> int:
    """Fills in where the parts of a message yet to be written lie. Returns its length, or BROKEN where tables do not
    rise. `nothing`: an empty array."""
    for s in range(1, columns.shape[1] - 1):
        if columns[TABLES, s] <= columns[TABLES, s - 1]:
            return BROKEN
    at = put_header(fields, nothing)
    if columns.shape[1] > 1:
        at = (put_directory(columns, nothing, 8 * at) + 7) >> 3
    return place_parts(columns, at)


@kernel("void(int64[::1], int64[:,::1], uint8[::1])")
def write(fields: Columns, columns: Columns, buffer: Bytes) -> None:
    """The header and the directory of columns that have their places, and zeros wherever nothing else will stand."""
    count = columns.shape[1] - 1
    at = put_header(fields, buffer)
    buffer[at : columns[IDS_AT, 0]] = 0
    buffer[columns[IDS_AT, count] : columns[VALUES_AT, 0]] = 0
    if count > 0:
        put_directory(columns, buffer, 8 * at)


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64[:,::1])")
def get_directory(buffer: Bytes, bit: int, columns: Columns) -> int:
    """Reads the columns of the directory that starts at a bit. Returns the bit behind it, or what is wrong."""
    count = columns.shape[1] - 1
    flags: int = np.int64(buffer[bit >> 3]) if bit < 8 * buffer.size else 255  # type: ignore[assignment]
    if flags & ~ALL_SHORT:
        return BROKEN
    bit += 8
    left = buffer.size
    for column in range(TABLES, VALUE_BYTES + 1):
        lead, bit = get_code(buffer, bit, LEAD_ORDER)
        if bit < 0 or lead > (MAX_WIDTH if column >= ID_BYTES else MOST):
            return BROKEN
        order = 0
        if not flags & (1 << column):
            order = np.int64(get_bits(buffer, bit, 4, buffer.size))  # type: ignore[assignment]
            bit += 4
        for s in range(count):
            number = 0
            if not flags & (1 << column):
                number, bit = get_code(buffer, bit, order)
                if bit < 0:
                    return BROKEN
            if column >= ID_FORMATS:
                number = unzigzag(np.uint64(number))
            if column >= ID_BYTES:
                number += lead * columns[ROWS, s]
                left -= number
                if number < 0:
                    return BROKEN
                if left < 0:
                    return TOO_LONG
            else:
                number += columns[TABLES, s - 1] + 1 if column == TABLES and s > 0 else lead
                if number < 0 or number > (MAX_FORMAT if column >= ID_FORMATS else MOST):
                    return BROKEN
            columns[column, s] = number
    return bit


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64[:,::1])")
def read_directory(buffer: Bytes, at: int, columns: Columns) -> int:
    """The columns of the directory that starts at `at`, and where the parts lie. Returns the length of the message that
    it reports, or what is wrong."""
    count, bit = columns.shape[1] - 1, 8 * at
    if count > 0:
        bit = get_directory(buffer, bit, columns)
        if bit < 0:
            return bit
    at = (bit + 7) >> 3
    length = place_parts(columns, at)
    if length == buffer.size and (
        (bit & 7 > 0 and buffer[at - 1] >> (bit & 7) > 0)
        or buffer[at : columns[IDS_AT, 0]].any()
        or buffer[columns[IDS_AT, count] : columns[VALUES_AT, 0]].any()
    ):
        return PADDING
    return length


@kernel("int64(int64[::1], int64[::1])")
def first_disorder(starts_S1: npt.NDArray[np.int64], ids_V: npt.NDArray[np.int64]) -> int:
    """The first position whose id is not above the one before it in its section; -1 when all are sorted and unique."""
    for s in range(starts_S1.size - 1):
        for v in range(starts_S1[s] + 1, starts_S1[s + 1]):
            if ids_V[v] <= ids_V[v - 1]:
                return v
    return -1
