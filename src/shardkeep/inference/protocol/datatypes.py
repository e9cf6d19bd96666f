"""Datatypes of the protocol: numpy's type of each, and the raw bytes of a tensor, packed and unpacked.

Raw bytes are little-endian, row-major. A BYTES element has its length in front, as 4 bytes.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.inference.protocol.status import invalid

Numbers = NDArray[Any]
Values = list[bytes] | Numbers
"""The elements of a tensor: texts of BYTES, or numbers in one dimension."""

BYTES = "BYTES"
NUMBERS: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_LENGTH = struct.Struct("<I")
_LENGTH_BYTES = _LENGTH.size


def unpack(name: str, datatype: str, raw: bytes, count: int) -> Values:
    """The `count` elements in raw bytes. Raises Refusal where they are not that many."""
    if datatype == BYTES:
        return _unpack_texts(name, raw, count)
    dtype = NUMBERS[datatype]
    if len(raw) != count * dtype.itemsize:
        expected = f"{count * dtype.itemsize} bytes for {count} elements of {datatype}"
        raise invalid(f"input {name}: has {len(raw)} bytes; expected: {expected}")
    return np.frombuffer(raw, dtype)


def pack(values: Values) -> bytes:
    """Undoes `unpack`."""
    if isinstance(values, list):
        return b"".join(part for text in values for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))
    if sys.byteorder == "big":
        values = values.astype(values.dtype.newbyteorder("<"))
    return values.tobytes()


def _unpack_texts(name: str, raw: bytes, count: int) -> list[bytes]:
    size = len(raw)
    if count == 1 and size >= _LENGTH_BYTES and int.from_bytes(raw[:_LENGTH_BYTES], "little") == size - _LENGTH_BYTES:
        return [raw[_LENGTH_BYTES:]]
    if _LENGTH_BYTES * count > size:  # before anything is made for `count` elements
        raise invalid(f"input {name}: has {size} bytes; expected: {count} elements of BYTES")
    found, at, length_at = list[bytes](), 0, _LENGTH.unpack_from
    while len(found) < count and at + _LENGTH_BYTES <= size:
        start = at + _LENGTH_BYTES
        at = start + length_at(raw, at)[0]
        found.append(raw[start:at])
    if at != size or len(found) != count:
        raise invalid(
            f"input {name}: its {size} bytes are not {count} elements of BYTES, each behind its 4-byte length"
        )
    return found
