"""The one binary form of every data-plane message: a header, a directory of sections, the sections' bytes.

Knows no table, codec or socket. A message is immutable once packed; unpacking copies nothing.

    header      40 B  magic, version, kind, generation, rank, step, number of sections, value
    directory   24 B a section: table, id format, value format, rows, bytes of ids, bytes of values
    ids         every section's, each starting at a multiple of 8 bytes
    values      every section's, each starting at a multiple of 8 bytes
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage

Bytes = npt.NDArray[np.uint8]

MAGIC = 0x4B53  # "SK"
VERSION = 1
_HEADER = np.dtype(
    [
        ("magic", "<u2"), ("version", "u1"), ("kind", "u1"), ("generation", "<u4"), ("rank", "<u4"),
        ("sections", "<u4"), ("step", "<i8"), ("value", "<i8"), ("length", "<u8"),
    ]
)  # fmt: skip
_ENTRY = np.dtype(
    [
        ("table", "<u4"), ("id_format", "u1"), ("value_format", "u1"), ("pad", "<u2"), ("rows", "<u4"),
        ("id_bytes", "<u4"), ("value_bytes", "<u8"),
    ]
)  # fmt: skip


class Kind(enum.IntEnum):
    """What a message asks or answers."""

    PULL = 1  # ids; waits for what the consistency mode promises; a pull of no ids is a fence
    READ = 2  # ids; answered at once (evaluation)
    ROWS = 3  # the answer to both; value = staleness of the rows in steps
    PUSH = 4  # ids and gradients
    ACK = 5  # the answer to a push
    ASK = 6  # a question in JSON (one section of values)
    ANSWER = 7  # its answer in JSON
    ERROR = 8  # the answer to anything that failed; a line of text


@dataclass(frozen=True, slots=True)
class Section:
    """One table's part of a message. `ids` and `values` are encoded; `rows` says how many they are."""

    table: int
    rows: int
    ids: Bytes
    values: Bytes
    id_format: int = 0
    value_format: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    generation: int
    rank: int
    step: int
    sections: tuple[Section, ...] = ()
    value: int = 0


EMPTY: Bytes = np.empty(0, dtype=np.uint8)


def pack(message: Message) -> Bytes:
    """The message as one fresh uint8 array."""
    sections = message.sections
    directory = np.array(
        [(s.table, s.id_format, s.value_format, 0, s.rows, s.ids.size, s.values.size) for s in sections],
        dtype=_ENTRY,
    )
    parts = [s.ids for s in sections] + [s.values for s in sections]
    starts, length = _layout([part.size for part in parts])
    out = np.zeros(length, dtype=np.uint8)
    out[: _HEADER.itemsize].view(_HEADER)[0] = (
        MAGIC, VERSION, int(message.kind), message.generation, message.rank,
        len(sections), message.step, message.value, length,
    )  # fmt: skip
    out[_HEADER.itemsize : _HEADER.itemsize + directory.nbytes] = directory.view(np.uint8)
    for start, part in zip(starts, parts, strict=True):
        out[start : start + part.size] = part
    return out


def unpack(buffer: Bytes) -> Message:
    """The message in `buffer`; its sections are views of it. Raises CorruptMessage."""
    plain = buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
    if not plain or buffer.size < _HEADER.itemsize:
        raise CorruptMessage(f"{buffer.size} bytes are no message; a header has {_HEADER.itemsize}")
    magic, version, kind, generation, rank, count, step, value, length = buffer[: _HEADER.itemsize].view(_HEADER)[0]
    if magic != MAGIC or version != VERSION:
        raise CorruptMessage(f"magic {magic:#x} version {version}, expected {MAGIC:#x} version {VERSION}")
    if length != buffer.size or _HEADER.itemsize + int(count) * _ENTRY.itemsize > buffer.size:
        raise CorruptMessage(f"{buffer.size} bytes received, the header says {length} with {count} sections")
    directory = buffer[_HEADER.itemsize : _HEADER.itemsize + int(count) * _ENTRY.itemsize].view(_ENTRY)
    entries = directory.tolist()
    starts, expected = _layout([entry[5] for entry in entries] + [entry[6] for entry in entries])
    if expected != buffer.size:
        raise CorruptMessage(f"{buffer.size} bytes received, the sections add up to {expected}")
    try:
        known = Kind(int(kind))
    except ValueError:
        raise CorruptMessage(f"unknown kind of message {kind}") from None
    count = int(count)
    sections = tuple(
        Section(
            table=table,
            rows=rows,
            ids=buffer[starts[i] : starts[i] + id_bytes],
            values=buffer[starts[count + i] : starts[count + i] + value_bytes],
            id_format=id_format,
            value_format=value_format,
        )
        for i, (table, id_format, value_format, _, rows, id_bytes, value_bytes) in enumerate(entries)
    )
    return Message(known, int(generation), int(rank), int(step), sections, int(value))


def overhead(message: Message) -> int:
    """Bytes of the packed message that are neither ids nor values."""
    sizes = [part.size for s in message.sections for part in (s.ids, s.values)]
    return _layout(sizes)[1] - sum(sizes)


def text_message(kind: Kind, text: str, *, generation: int = 0, rank: int = 0) -> Bytes:
    """A packed ASK, ANSWER or ERROR."""
    body = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    return pack(Message(kind, generation, rank, 0, (Section(0, 0, EMPTY, body),)))


def text_of(message: Message) -> str:
    """The text of an ASK, ANSWER or ERROR."""
    if len(message.sections) != 1:
        raise CorruptMessage(f"{message.kind.name} with {len(message.sections)} sections; allowed: 1")
    return bytes(message.sections[0].values).decode("utf-8", errors="replace")


def _layout(parts: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes start (every section's ids, then every section's values), and the whole's length."""
    starts, at = [], _HEADER.itemsize + len(parts) // 2 * _ENTRY.itemsize
    for size in parts:
        starts.append(at)
        at += (size + 7) & ~7
    return starts, at
