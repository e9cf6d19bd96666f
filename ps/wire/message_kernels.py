"""Kernels of messages: a directory's columns in few bytes and back, where the parts lie, the order of ids.

A directory is a byte of flags, then the columns in this order, a varint (LEB128) for each section. A flag says that a
column has its short form:

    tables           how far from the one behind the section before's, zigzag    short: left out; they are 0, 1, ...
    rows             how many
    id formats       the tag                                                     short: one for all
    value formats    the tag                                                     short: one for all
    bytes of ids     how many                                                    short: those of a row, for all
    bytes of values  how many                                                    short: those of a row, for all

A message without sections has no directory.
"""
# S = sections of a message

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes
from shardkeep.base.compiling.kernels import kernel
from shardkeep.compression.ids.bit_kernels import get_varint, put_varint, unzigzag, varint_size, zigzag

Columns = npt.NDArray[np.int64]

# Rows of the columns, each with room for S + 1 numbers. A directory has the first six; a flag is 1 << column.
TABLES, ROWS, ID_FORMATS, VALUE_FORMATS, ID_BYTES, VALUE_BYTES = 0, 1, 2, 3, 4, 5
IDS_AT, VALUES_AT = 6, 7  # where each section's part starts, and where the last one's ends
NUM_COLUMNS = 8

ALL_SHORT = 1 << TABLES | 1 << ID_FORMATS | 1 << VALUE_FORMATS | 1 << ID_BYTES | 1 << VALUE_BYTES
BROKEN, TOO_LONG, PADDING = -1, -2, -3
"""What `read_directory` returns in place of a length: numbers that are none, parts beyond all there is, set padding."""
MOST, MOST_FORMAT = 2**32 - 1, 255
"""The largest table and number of rows, the largest tag of a format."""


@kernel("int64(int64[:,::1], int64)")
def width_of(columns: Columns, column: int) -> int:
    """Bytes of a row, in the first section that has rows."""
    for s in range(columns.shape[1] - 1):
        if columns[ROWS, s] > 0:
            width: int = columns[column, s] // columns[ROWS, s]
            return width
    return 0


@kernel("int64(int64[:,::1])")
def short_columns(columns: Columns) -> int:
    """The flags of a directory."""
    flags = ALL_SHORT
    id_width, value_width = width_of(columns, ID_BYTES), width_of(columns, VALUE_BYTES)
    for s in range(columns.shape[1] - 1):
        if columns[TABLES, s] != s:
            flags &= ~(1 << TABLES)
        if columns[ID_FORMATS, s] != columns[ID_FORMATS, 0]:
            flags &= ~(1 << ID_FORMATS)
        if columns[VALUE_FORMATS, s] != columns[VALUE_FORMATS, 0]:
            flags &= ~(1 << VALUE_FORMATS)
        if columns[ID_BYTES, s] != id_width * columns[ROWS, s]:
            flags &= ~(1 << ID_BYTES)
        if columns[VALUE_BYTES, s] != value_width * columns[ROWS, s]:
            flags &= ~(1 << VALUE_BYTES)
    return flags


@kernel("int64(int64[:,::1], int64, int64)")
def length_of(columns: Columns, flags: int, column: int) -> int:
    """How many numbers represent a column."""
    if flags & (1 << column):
        return 0 if column == TABLES else 1
    count: int = columns.shape[1] - 1
    return count


@kernel("uint64(int64[:,::1], int64, int64, int64)")
def number_of(columns: Columns, flags: int, column: int, s: int) -> np.uint64:
    """The number that represents a section in a column, or for all of them."""
    if column == TABLES:
        return zigzag(columns[TABLES, s] - (columns[TABLES, s - 1] + 1 if s > 0 else 0))
    if column >= ID_BYTES and flags & (1 << column):
        return np.uint64(width_of(columns, column))
    return np.uint64(columns[column, s])


@kernel("int64(int64[:,::1], int64)")
def place_parts(columns: Columns, at: int) -> int:
    """Fills in where the parts lie behind a directory that ends at `at`. Returns the message's length."""
    count = columns.shape[1] - 1
    at = (at + 7) & ~7
    for s in range(count):
        columns[IDS_AT, s] = at
        at += columns[ID_BYTES, s]
    columns[IDS_AT, count] = at
    at = (at + 7) & ~7
    for s in range(count):
        columns[VALUES_AT, s] = at
        at += columns[VALUE_BYTES, s]
    columns[VALUES_AT, count] = at
    return (at + 7) & ~7


@kernel("int64(int64[:,::1], int64)")
def place(columns: Columns, start: int) -> int:
    """As `place_parts`, behind a directory yet to be written that starts at `start`."""
    count = columns.shape[1] - 1
    at = start
    if count > 0:
        at += 1
        flags = short_columns(columns)
        for column in range(TABLES, VALUE_BYTES + 1):
            for s in range(length_of(columns, flags, column)):
                at += varint_size(number_of(columns, flags, column, s))
    return place_parts(columns, at)


@kernel("void(int64[:,::1], uint8[::1], int64)")
def write_directory(columns: Columns, buffer: Bytes, at: int) -> None:
    """The directory of columns that have their places, and zeros wherever nothing else will stand."""
    count = columns.shape[1] - 1
    if count > 0:
        flags = short_columns(columns)
        buffer[at] = flags
        at += 1
        for column in range(TABLES, VALUE_BYTES + 1):
            for s in range(length_of(columns, flags, column)):
                at = put_varint(buffer, at, number_of(columns, flags, column, s))
    buffer[at : columns[IDS_AT, 0]] = 0
    buffer[columns[IDS_AT, count] : columns[VALUES_AT, 0]] = 0
    buffer[columns[VALUES_AT, count] :] = 0


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64[::1], int64, int64)")
def read_column(buffer: Bytes, at: int, numbers: Columns, length: int, most: int) -> int:
    """Fills the first `length` numbers, of `most` or less each. Returns where they end, or BROKEN."""
    for s in range(length):
        number, at = get_varint(buffer, at, buffer.size)
        if at < 0 or number > np.uint64(most):
            return BROKEN
        numbers[s] = np.int64(number)
    return at


@kernel("int64(int64, int64)")
def most_of(column: int, size: int) -> int:
    """The largest number that a column of a directory may have, in a message of `size` bytes."""
    if column >= ID_BYTES:
        return size
    if column == TABLES:
        return 2 * MOST + 1
    return MOST if column == ROWS else MOST_FORMAT


@kernel("boolean(int64[:,::1], int64)")
def spread_tables(columns: Columns, flags: int) -> bool:
    """Distances become tables. False where one is below 0 or above MOST."""
    table = -1
    for s in range(columns.shape[1] - 1):
        table += 1
        if not flags & (1 << TABLES):
            table += unzigzag(np.uint64(columns[TABLES, s]))
        if table < 0 or table > MOST:
            return False
        columns[TABLES, s] = table
    return True


@kernel("boolean(int64[:,::1], int64, int64, int64)")
def spread_bytes(columns: Columns, flags: int, column: int, most: int) -> bool:
    """Bytes of a row become bytes of a section. False where they are more than `most` in all."""
    left = most
    for s in range(columns.shape[1] - 1):
        if flags & (1 << column):
            rows = columns[ROWS, s]
            if rows > 0 and columns[column, s] > left // rows:
                return False
            columns[column, s] *= rows
        left -= columns[column, s]
        if left < 0:
            return False
    return True


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64)")
def clear(buffer: Bytes, begin: int, end: int) -> bool:
    """Whether there are only zeros."""
    bits = np.uint8(0)
    for i in range(begin, end):
        bits |= buffer[i]
    return bits == 0  # type: ignore[no-any-return]


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64[:,::1])")
def read_directory(buffer: Bytes, at: int, columns: Columns) -> int:
    """The columns of the directory that starts at `at`, a byte of the buffer, and where the parts lie. Returns the
    length of the message that it reports, or what is wrong."""
    count = columns.shape[1] - 1
    if count > 0:
        flags: int = np.int64(buffer[at])  # type: ignore[assignment]
        if flags & ~ALL_SHORT:
            return BROKEN
        at += 1
        for column in range(TABLES, VALUE_BYTES + 1):
            length = length_of(columns, flags, column)
            at = read_column(buffer, at, columns[column], length, most_of(column, buffer.size))
            if at < 0:
                return BROKEN
            if length == 1:
                columns[column, 1:count] = columns[column, 0]
        if not spread_tables(columns, flags):
            return BROKEN
        if not (
            spread_bytes(columns, flags, ID_BYTES, buffer.size)
            and spread_bytes(columns, flags, VALUE_BYTES, buffer.size)
        ):
            return TOO_LONG
    length = place_parts(columns, at)
    if length == buffer.size and not (
        clear(buffer, at, columns[IDS_AT, 0])
        and clear(buffer, columns[IDS_AT, count], columns[VALUES_AT, 0])
        and clear(buffer, columns[VALUES_AT, count], length)
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
