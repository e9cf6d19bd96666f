"""The bytes of a journal's segments: a header, then records, each with a checksum and padded to 8 bytes.

All numbers are little-endian. Knows no files and no lock: see `ps/shard/journal/journal.py`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT = 1
"""Tables with policies have not changed it: a replay repeats their decisions from the pushes."""
EMPTY: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
_SEGMENT = struct.Struct("<8sQQQ")  # magic, format, generation, number; then their checksum
_MAGIC = b"skjournl"
_RECORD = struct.Struct("<HHIqQ")  # mark, entry, rank, step, bytes of the body; then a checksum of all and the body
_MARK = 0xA95C
_SUM = struct.Struct("<Q")
SEGMENT_HEAD = _SEGMENT.size + _SUM.size
_RECORD_HEAD = _RECORD.size + _SUM.size
_ZEROS = bytes(8)

Parts = Sequence[bytes | memoryview]


class Entry(enum.IntEnum):
    """The kind of a record: a push arrived, a step was applied, a generation began."""

    PUSH = 1
    APPLIED = 2
    GENERATION = 3


_STARTS = np.array([_MARK | entry << 16 for entry in Entry], dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `body` (uint8): a view that keeps its whole segment in memory; the reader may change it."""

    entry: Entry
    rank: int
    step: int
    body: npt.NDArray[np.uint8]


def record_parts(entry: Entry, rank: int, step: int, body: npt.NDArray[np.uint8]) -> Parts:
    """The bytes of a record on disk. Does not copy the body."""
    fields = _RECORD.pack(_MARK, entry, rank, step, body.nbytes)
    return [fields + _SUM.pack(_checksum(fields, body)), body.data, _ZEROS[: -body.nbytes % 8]]


def _checksum(fields: bytes, body: npt.NDArray[np.uint8]) -> int:
    """xxh3 of the body, seeded with that of the fields: one call each, and no copy joins them."""
    return xxhash.xxh3_64_intdigest(body.data, seed=xxhash.xxh3_64_intdigest(fields))


def segment_head(generation: int, number: int) -> bytes:
    """The header of a segment, SEGMENT_HEAD bytes."""
    fields = _SEGMENT.pack(_MAGIC, FORMAT, generation, number)
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def format_of(head: bytes) -> int | None:
    """The format number in a segment's header; None = not a valid header."""
    magic, version, _, _ = _SEGMENT.unpack_from(head)
    whole = magic == _MAGIC and head[_SEGMENT.size :] == _SUM.pack(xxhash.xxh3_64_intdigest(head[: _SEGMENT.size]))
    return int(version) if whole else None


def record_at(data: npt.NDArray[np.uint8], offset: int) -> tuple[Record, int] | None:
    """The record at `offset`, a multiple of 8, and the offset of the next; None = no whole record."""
    start = offset + _RECORD_HEAD
    if start > data.size:
        return None
    mark, entry, rank, step, size = _RECORD.unpack_from(data.data, offset)
    if mark != _MARK or not Entry.PUSH <= entry <= Entry.GENERATION or start + size + -size % 8 > data.size:
        return None
    body = data[start : start + size]
    fields = data[offset : offset + _RECORD.size].tobytes()
    if _SUM.unpack_from(data.data, offset + _RECORD.size)[0] != _checksum(fields, body):
        return None
    return Record(Entry(entry), rank, step, body), start + size + -size % 8


def record_after(data: npt.NDArray[np.uint8], offset: int) -> bool:
    """Whether a whole record follows a bad one. Searches all offsets, because the bad record's length may be wrong."""
    marks = data[offset : data.size // 8 * 8].view("<u4")[::2]
    starts = np.flatnonzero(np.isin(marks, _STARTS)) * 8 + offset
    return any(record_at(data, start) is not None for start in starts.tolist())
