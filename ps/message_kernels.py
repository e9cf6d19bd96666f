"""Kernels of messages: a directory's columns, and where the parts of a message lie."""
# S = sections of a message

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.kernels import kernel

Columns = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

# Rows of the columns, each with room for S + 1 numbers.
TABLES, ROWS, ID_FORMATS, VALUE_FORMATS, ID_BYTES, VALUE_BYTES = 0, 1, 2, 3, 4, 5
IDS_AT, VALUES_AT = 6, 7  # where each section's part starts, and where the last one's ends
NUM_COLUMNS = 8
ENTRY_BYTES = 24  # six words: table, formats (ids | values << 8), rows, bytes of ids, bytes of values (low, high)


@kernel("int64(int64[:,::1], int64)")
def place(columns: Columns, start: int) -> int:
    """Fills in where the parts lie when the first section's ids start at `start`. Returns the message's length."""
    count = columns.shape[1] - 1
    at = start
    for s in range(count):
        columns[IDS_AT, s] = at
        at += (columns[ID_BYTES, s] + 7) & ~7
    columns[IDS_AT, count] = at
    for s in range(count):
        columns[VALUES_AT, s] = at
        at += columns[VALUE_BYTES, s]
    columns[VALUES_AT, count] = at
    return (at + 7) & ~7


@kernel("void(int64[:,::1], uint32[::1])")
def write_directory(columns: Columns, words: npt.NDArray[np.uint32]) -> None:
    for s in range(columns.shape[1] - 1):
        at = 6 * s
        words[at] = columns[TABLES, s]
        words[at + 1] = columns[ID_FORMATS, s] | (columns[VALUE_FORMATS, s] << 8)
        words[at + 2] = columns[ROWS, s]
        words[at + 3] = columns[ID_BYTES, s]
        words[at + 4] = columns[VALUE_BYTES, s] & 0xFFFFFFFF
        words[at + 5] = columns[VALUE_BYTES, s] >> 32


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64)")
def word(buffer: Bytes, at: int) -> int:
    """32 bits, little end first; messages may lie at any address."""
    low = np.int64(buffer[at]) | (np.int64(buffer[at + 1]) << 8)
    high = np.int64(buffer[at + 2]) | (np.int64(buffer[at + 3]) << 8)
    return low | (high << 16)  # type: ignore[return-value]


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64[:,::1])")
def read_directory(buffer: Bytes, start: int, columns: Columns) -> bool:
    """The columns of the directory that starts there. False when a section claims 2**32 bytes of values or more."""
    for s in range(columns.shape[1] - 1):
        at = start + ENTRY_BYTES * s
        formats = word(buffer, at + 4)
        columns[TABLES, s] = word(buffer, at)
        columns[ID_FORMATS, s] = formats & 255
        columns[VALUE_FORMATS, s] = (formats >> 8) & 255
        columns[ROWS, s] = word(buffer, at + 8)
        columns[ID_BYTES, s] = word(buffer, at + 12)
        columns[VALUE_BYTES, s] = word(buffer, at + 16)
        if word(buffer, at + 20) != 0:
            return False
    return True
