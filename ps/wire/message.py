"""The one binary form of every data-plane message: a header, a directory of sections, the sections' bytes.

Knows no table, codec or socket. A message is immutable once sent; reading one copies nothing.

    header      6 or more bytes: version and kind, generation, rank, step, value, number of sections
    directory   about a byte per section: table, rows, id format, value format, bytes of ids, bytes of values
    ids         every section's, one after the other
    values      every section's, one after the other

Raw ids and raw values begin at a multiple of 8 bytes, with zeros before them. message_kernels.py has both ends of
header and directory.

`Packed` is a message in this form, with the directory as arrays.
"""
# S = sections of a message

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.ps.wire import message_kernels as at

VERSION = 4
"""The upper four bits of a message's first byte; the kind is the lower four."""
_FLOAT, _BITS = struct.Struct("<f"), struct.Struct("<I")
_ONE, _INFINITY = 0x3F800000, 0x7F800000  # float32 bits
_LEAST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # normal float32 numbers above 0
FLUSH = 1
"""Marks a push with the residuals of earlier pushes. Servers do not read it."""
LR_FACTOR = 2
"""Marks a push with a learning-rate factor: its float32 bits are the upper half of `value`. No mark = factor 1."""
MAX_PULLS = 30
"""Pulls of a step that its push can name, by their numbers 1 to 30: bits 2 to 31 of its `value`."""
MAX_SECTIONS = 1 << 16
"""A few bytes of a directory become some 100 in memory; no job has so many tables."""


class Kind(enum.IntEnum):
    """What a message asks or answers."""

    PULL = 1  # ids; waits for what the consistency mode promises; value = its number in its step, 0 = no push names it
    READ = 2  # ids; answered at once (evaluation)
    ROWS = 3  # the answer to both; value = staleness of the rows in steps
    PUSH = 4  # ids and gradients; value = FLUSH, LR_FACTOR and the pulls that it names (push_value, pull_names)
    ACK = 5  # the answer to a push or a fence
    ASK = 6  # a question in JSON (one section of values)
    ANSWER = 7  # its answer in JSON
    ERROR = 8  # the answer to anything that failed; a line of text
    FENCE = 9  # in sync: waits until all pushes of earlier steps are here; value 1 = every server has them: applied


_WRONG = {
    at.BROKEN: "the directory ends too early or has a number that cannot be",
    at.TOO_LONG: "the sections alone have more",
    at.PADDING: "the padding is not all zeros",
}
_KINDS = {int(kind): kind for kind in Kind}


EMPTY: Bytes = np.empty(0, dtype=np.uint8)
_NO_SECTIONS: Ints = np.empty(0, dtype=np.int64)
_TABLE_0: Ints = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """A message in its binary form: the header's fields, the directory's columns, and where each part lies."""

    kind: Kind
    generation: int
    rank: int
    step: int
    value: int
    buffer: Bytes
    tables_S: Ints
    rows_S: Ints
    id_formats_S: Ints
    value_formats_S: Ints
    ids_at_S1: Ints
    """Where each section's ids start in the buffer, and where the last one's end."""
    values_at_S1: Ints
    """Where each section's values start, and where the last one's end."""

    @property
    def ids_area(self) -> Bytes:
        """All sections' ids, a view without gaps."""
        return self.buffer[self.ids_at_S1[0] : self.ids_at_S1[-1]]

    @property
    def values_area(self) -> Bytes:
        """All sections' values, a view without gaps."""
        return self.buffer[self.values_at_S1[0] : self.values_at_S1[-1]]

    @property
    def id_sizes(self) -> Ints:
        """Bytes of each section's ids, (S,)."""
        return self.ids_at_S1[1:] - self.ids_at_S1[:-1]

    @property
    def value_sizes(self) -> Ints:
        """Bytes of each section's values, (S,)."""
        return self.values_at_S1[1:] - self.values_at_S1[:-1]

    def values_of(self, s: int) -> Bytes:
        """The values of section `s`, a view."""
        return self.buffer[self.values_at_S1[s] : self.values_at_S1[s + 1]]


class Directory(TypedDict, total=False):
    """Columns of a message's directory, of S sections; a number represents a column of it, and a column left out is 0.
    Without `tables_S` and `rows_S` there are no sections."""

    tables_S: Ints
    rows_S: Ints
    id_bytes_S: Ints | int
    value_bytes_S: Ints | int
    id_formats_S: Ints | int
    value_formats_S: Ints | int


def allocate(
    kind: Kind, *, generation: int, rank: int, step: int, value: int = 0, **directory: Unpack[Directory]
) -> Packed:
    """A message with its header and directory written and its padding cleared; the caller fills ids and values.

    Raises ProtocolError for more than MAX_SECTIONS."""
    tables_S = directory.get("tables_S", _NO_SECTIONS)
    count = tables_S.size
    if count > MAX_SECTIONS:
        raise ProtocolError(f"a message of {count} sections; allowed: {MAX_SECTIONS}")
    columns = np.empty((at.NUM_COLUMNS, count + 1), dtype=np.int64)
    names = ("tables_S", "rows_S", "id_formats_S", "value_formats_S", "id_bytes_S", "value_bytes_S")
    for row, name in zip(columns, names, strict=False):  # in the order of the kernels' numbers
        row[:count] = cast(dict[str, Any], directory).get(name, 0)
    fields = _fields(kind, generation, rank, step, value, count)
    length = at.place(fields, columns, EMPTY)
    if length < 0:
        raise ProtocolError(f"a message of tables {tables_S[:4].tolist()}; allowed: tables that rise")
    buffer = np.empty(length, dtype=np.uint8)
    at.write(fields, columns, buffer)
    return _packed(kind, generation, rank, step, value, buffer, columns)


def read(buffer: Bytes) -> Packed:
    """The message in `buffer`, checked for being one whole message. Copies nothing. Raises CorruptMessage."""
    if not (buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous and buffer.size):
        raise CorruptMessage(f"{buffer.size} bytes are no message")
    version, kind, fields = int(buffer[0]) >> 4, kind_of(buffer), np.empty(at.NUM_FIELDS, dtype=np.int64)
    if version != VERSION:
        raise CorruptMessage(f"version {version}, expected {VERSION}")
    if kind not in _KINDS:
        raise CorruptMessage(f"unknown kind of message {kind}")
    end = at.read_header(buffer, fields)
    _, generation, rank, step, value, count = fields.tolist()
    if end < 0 or count > min(8 * (buffer.size - end), MAX_SECTIONS):
        header = f"{count} sections" if end > 0 else "numbers that cannot be"
        raise CorruptMessage(f"{buffer.size} bytes received, the header has {header}")
    columns = np.empty((at.NUM_COLUMNS, count + 1), dtype=np.int64)
    expected = at.read_directory(buffer, end, columns)
    if expected != buffer.size:
        problem = _WRONG.get(expected, f"the sections add up to {expected}")
        raise CorruptMessage(f"{buffer.size} bytes received, {problem}")
    return _packed(_KINDS[kind], generation, rank, step, value, buffer, columns)


def push_value(*, flush: bool, lr_factor: float) -> int:
    """The `value` of a PUSH. Rounds the factor to float32. Raises ProtocolError unless it is a normal number above
    0."""
    value = FLUSH if flush else 0
    if lr_factor == 1.0:
        return value
    if not _LEAST <= lr_factor <= _LARGEST:
        raise ProtocolError(f"lr_factor: {lr_factor:g}; allowed: {_LEAST:g} to {_LARGEST:g}")
    (bits,) = _BITS.unpack(_FLOAT.pack(lr_factor))
    return value if bits == _ONE else value | LR_FACTOR | bits << 32


def lr_factor_of(packed: Packed) -> float:
    """The learning-rate factor of a PUSH, a float32. Raises CorruptMessage."""
    if not packed.value & LR_FACTOR:
        return 1.0
    bits = packed.value >> 32
    if not 0 < bits < _INFINITY:
        raise CorruptMessage(f"PUSH with the bits {bits & 0xFFFFFFFF:#x} as learning-rate factor; allowed: above 0")
    return float(_FLOAT.unpack(_BITS.pack(bits))[0])


def pull_names(numbers: Iterable[int]) -> int:
    """The bits of a PUSH's `value` that name pulls."""
    return sum(1 << number + 1 for number in numbers)


def named_pulls(packed: Packed) -> list[int]:
    """The numbers of the pulls that a PUSH names."""
    return [number for number in range(1, MAX_PULLS + 1) if packed.value >> number + 1 & 1]


def set_value(packed: Packed, value: int) -> bool:
    """Writes another `value` into the buffer of a message that is not sent yet, if it takes as many bytes."""
    before, fields = (
        _fields(packed.kind, packed.generation, packed.rank, packed.step, each, packed.tables_S.size)
        for each in (packed.value, value)
    )
    fits = bool(at.put_header(fields, EMPTY) == at.put_header(before, EMPTY))
    if fits:
        at.put_header(fields, packed.buffer)
    return fits


def kind_of(buffer: Bytes) -> int:
    """The kind of a packed message, a number of Kind."""
    return int(buffer[0]) & 15


def value_of(buffer: Bytes) -> int:
    """The `value` of a packed message."""
    return _field(buffer, at.VALUE)


def step_of(buffer: Bytes, kind: Kind) -> int:
    """The step of a packed message of this kind; -1 = it is of another kind."""
    return _field(buffer, at.STEP) if kind_of(buffer) == kind else -1


def addressed(buffer: Bytes, generation: int) -> Bytes:
    """The packed message for another generation: a copy, because a peer may still read the buffer."""
    old = read(buffer)
    names = ("rank", "step", "value", "tables_S", "rows_S", "id_formats_S", "value_formats_S")
    same: dict[str, Any] = {name: getattr(old, name) for name in names}
    same |= {"id_bytes_S": old.id_sizes, "value_bytes_S": old.value_sizes}
    new = allocate(old.kind, generation=generation, **same)
    new.ids_area[:], new.values_area[:] = old.ids_area, old.values_area
    return new.buffer


def text_message(kind: Kind, text: str, *, generation: int = 0, rank: int = 0) -> Bytes:
    """A packed ASK, ANSWER or ERROR."""
    body = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    place = {"generation": generation, "rank": rank, "step": 0}
    message = allocate(kind, **place, tables_S=_TABLE_0, rows_S=_TABLE_0, value_bytes_S=body.size)
    message.values_area[:] = body
    return message.buffer


def text_of(message: Packed) -> str:
    """The text of an ASK, ANSWER or ERROR."""
    if message.tables_S.size != 1:
        raise CorruptMessage(f"{message.kind.name} with {message.tables_S.size} sections; allowed: 1")
    return bytes(message.values_area).decode("utf-8", errors="replace")


def _field(buffer: Bytes, number: int) -> int:
    fields = np.empty(at.NUM_FIELDS, dtype=np.int64)
    at.read_header(buffer, fields)
    return int(fields[number])


def _fields(kind: Kind, generation: int, rank: int, step: int, value: int, sections: int) -> Ints:
    """A header as the kernels take it."""
    return np.array([VERSION << 4 | kind, generation, rank, step, value, sections], dtype=np.int64)


def _packed(kind: Kind, generation: int, rank: int, step: int, value: int, buffer: Bytes, columns: Ints) -> Packed:
    directory = [*columns[: at.ID_BYTES, :-1], columns[at.IDS_AT], columns[at.VALUES_AT]]
    return Packed(kind, generation, rank, step, value, buffer, *directory)
