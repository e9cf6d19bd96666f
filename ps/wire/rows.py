"""Rows of several tables between flat float32 arrays and the bytes of a message, by the format of each table.

A format is a number on the wire: the tag of a value codec, and a bit if a second moment follows each row's bytes.
Codecs work on rows of one width, so tables of equal format and dim that follow each other are coded in one call.
"""
# T = tables of the job, S = sections, K = rows, D = embedding dim

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Bytes, Floats, Ints
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values import elements
from shardkeep.compression.values.codec import ValueCodec, value_codec
from shardkeep.compression.values.floats import saturated_values
from shardkeep.compression.values.moments import decode_moments, encode_moments
from shardkeep.compression.values.registry import Scale
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.wire.message import Packed

T = TypeVar("T", bound=np.generic)
Runs = list[tuple[int, int, int]]
"""(format, dim, rows) of consecutive sections that are coded in one call."""

PLAIN = 0
"""The format of the float32 rows themselves."""
ELEMENTS = 96
"""Single elements of float32 rows, each section a packet on its own (compression/values/elements.py)."""
_MOMENTS = 128
"""The bit of a format that says that a second moment follows each row."""
_DIM_BITS = 32
"""A format and a dim are one key: the dim has these bits."""


def format_of(values: str, scale: Scale | None = None, *, moments: bool = False) -> int:
    """The format of a codec's name."""
    return value_codec(values, scale).tag | (_MOMENTS if moments else 0)


def codec_of(row_format: int) -> ValueCodec:
    """Raises CorruptMessage for a format that no codec has."""
    return value_codec(row_format & ~_MOMENTS)


def has_moments(row_format: int) -> bool:
    """Whether a second moment follows each row."""
    return bool(row_format & _MOMENTS)


@functools.cache
def row_bytes(row_format: int, dim: int) -> int:
    """Bytes of a row of `dim` values."""
    return codec_of(row_format).row_bytes(dim) + has_moments(row_format)


class RowFormats:
    """The format of each table.

    Args:
        formats_T: Of each table.
    """

    def __init__(self, catalog: Catalog, formats_T: Sequence[int]) -> None:
        self._dims_T = catalog.dims_T
        self.tags_T: Ints = np.array(formats_T, dtype=np.int64)
        """Number on the wire of each table's format."""
        self.widths_T = _widths(self.tags_T, self._dims_T)
        """Bytes of one row of each table."""
        self.plain = not self.tags_T.any()
        """Whether the bytes are the float32 rows themselves."""
        self._moments_T: Bools = (self.tags_T & _MOMENTS) > 0
        self._keys_T = self.tags_T << _DIM_BITS | catalog.dims_T
        self._one = len(set(self._keys_T.tolist())) == 1

    def encode(self, flat: Floats, rows_S: Ints, tables_S: Ints | None = None) -> Bytes:
        """The rows of all sections, each with its mean square behind it if its format has moments, as flat uint8. May
        share memory with `flat`. `tables_S` None = a section of every table."""
        if self.plain:
            return flat.view(np.uint8)
        parts, at = [], 0
        for row_format, dim, rows in self._runs(rows_S, tables_S):
            width = dim + has_moments(row_format)
            values_KW = flat[at : at + rows * width].reshape(rows, width)
            encoded = codec_of(row_format).encode(np.ascontiguousarray(values_KW[:, :dim]))
            if has_moments(row_format):
                encoded = np.column_stack([encoded, encode_moments(values_KW[:, dim])])
            parts.append(encoded.reshape(-1))
            at += values_KW.size
        return _joined(parts, np.uint8)

    def decode(self, encoded: Bytes, rows_S: Ints) -> Floats:
        """Undoes `encode` of a section of every table, without the moments."""
        if self.plain:
            return _float32(encoded)
        return _decoded(encoded, self._runs(rows_S), moments=False)

    def with_moments(self, flat: Floats, squares_K: Floats, rows_T: Ints) -> Floats:
        """Rows of all tables as `encode` takes them, from the rows and what the moments are made of."""
        if not self._moments_T.any():
            return flat
        moments_K, ends_K = np.repeat(self._moments_T, rows_T), np.cumsum(np.repeat(self._dims_T, rows_T))
        return np.insert(flat, ends_K[moments_K], squares_K[moments_K])

    def saturated_values(self, encoded: Bytes, rows_S: Ints) -> int:
        """How many values of a section of every table are the largest of a 16-bit format: they may have been larger."""
        total, at = 0, 0
        for row_format, dim, rows in [] if self.plain else self._runs(rows_S):
            codec, width = codec_of(row_format), row_bytes(row_format, dim)
            encoded_KB = encoded[at : at + rows * width].reshape(rows, width)
            total += saturated_values(codec, encoded_KB[:, : codec.row_bytes(dim)])
            at += encoded_KB.size
        return total

    def _runs(self, rows_S: Ints, tables_S: Ints | None = None) -> Runs:
        if self._one:
            return [(*_split(int(self._keys_T[0])), int(rows_S.sum()))]
        return _runs(self._keys_T if tables_S is None else self._keys_T[tables_S], rows_S)


def decode(packed: Packed, catalog: Catalog) -> Floats:
    """The rows of all sections, flat float32, aligned; those of the sections that `moments_of` names have their mean
    squares behind them. May share memory with the message.

    Raises CorruptMessage when a section has not the bytes that its rows need, or an unknown format."""
    formats_S, rows_S = packed.value_formats_S, packed.rows_S
    if not formats_S.size:
        return np.empty(0, dtype=np.float32)
    first, alike = int(formats_S[0]), bool((formats_S == formats_S[0]).all())
    if alike and first == ELEMENTS:
        return _decode_elements(packed, catalog)
    if not alike and (formats_S == ELEMENTS).any():
        wrong = sorted(set(formats_S.tolist()))
        raise CorruptMessage(f"sections with value formats {wrong}; allowed: {ELEMENTS} alone")
    one_dim = catalog.one_dim if alike else None
    dims_S = catalog.dims_T[packed.tables_S]
    widths = _widths(formats_S, dims_S) if one_dim is None else row_bytes(first, one_dim)
    wrong_S = packed.value_sizes != rows_S * widths
    if wrong_S.any():
        s = int(wrong_S.argmax())
        raise CorruptMessage(
            f"table {catalog.names[packed.tables_S[s]]}: {packed.value_sizes[s]} bytes of "
            f"{codec_of(int(formats_S[s])).name} values for {rows_S[s]} rows of {dims_S[s]}"
        )
    values = packed.buffer[packed.values_at_S1[0] : packed.values_at_S1[-1]]
    if alike and first == PLAIN:
        return _float32(values)
    runs = _runs(formats_S << _DIM_BITS | dims_S, rows_S) if one_dim is None else [(first, one_dim, int(rows_S.sum()))]
    return _decoded(values, runs, moments=True)


def moments_of(packed: Packed) -> Bools:
    """Whether a second moment follows each row, for each section."""
    return np.asarray((packed.value_formats_S & _MOMENTS) > 0)


def _decoded(encoded: Bytes, runs: Runs, *, moments: bool) -> Floats:
    """The values of all runs, flat float32, which may share memory with the bytes. `moments`: with those, where a
    format has them. Raises CorruptMessage when the bytes are not those of so many rows."""
    parts, at = [], 0
    for row_format, dim, rows in runs:
        size, codec = rows * row_bytes(row_format, dim), codec_of(row_format)
        part = encoded[at : at + size]
        at += size
        if has_moments(row_format):
            if part.size != size:
                raise CorruptMessage(f"{encoded.size} bytes of {codec.name} values and moments end too early")
            part_KB = part.reshape(rows, row_bytes(row_format, dim))
            part = np.ascontiguousarray(part_KB[:, :-1])
        values_KW = codec.decode(part, dim)
        if has_moments(row_format) and moments:
            values_KW = np.column_stack([values_KW, decode_moments(part_KB[:, -1])])
        parts.append(values_KW.reshape(-1))
    return _joined(parts, np.float32)


def _runs(keys_S: Ints, rows_S: Ints) -> Runs:
    """The longest runs of sections with one key, a format and a dim."""
    if not rows_S.size:
        return []
    starts = [0, *(np.flatnonzero(np.diff(keys_S)) + 1).tolist()]
    sizes = zip(keys_S[starts].tolist(), np.add.reduceat(rows_S, starts).tolist(), strict=True)
    return [(*_split(key), rows) for key, rows in sizes]


def _split(key: int) -> tuple[int, int]:
    return key >> _DIM_BITS, key & (1 << _DIM_BITS) - 1


def _widths(formats_S: Ints, dims_S: Ints) -> Ints:
    """Bytes of one row of each section."""
    return np.array(list(map(row_bytes, formats_S.tolist(), dims_S.tolist())), dtype=np.int64)


def encode_elements(flat: Floats, rows_S: Ints, tables_S: Ints, catalog: Catalog) -> list[Bytes]:
    """A packet for each section, of the values that are not zero."""
    packets, at = [], 0
    for rows, dim in zip(rows_S.tolist(), catalog.dims_T[tables_S].tolist(), strict=True):
        rows_KD = flat[at : at + rows * dim].reshape(rows, dim)
        packets.append(elements.encode(rows_KD, rows_KD != 0.0, codec_of(PLAIN)))
        at += rows * dim
    return packets


def elements_of(packed: Packed) -> int:
    """How many elements a message of them has."""
    return sum(elements.count_of(packed.values_of(s)) for s in range(packed.tables_S.size))


def _decode_elements(packed: Packed, catalog: Catalog) -> Floats:
    parts = []
    for s, rows in enumerate(packed.rows_S.tolist()):
        dim = int(catalog.dims_T[packed.tables_S[s]])
        rows_KD, _ = elements.decode(packed.values_of(s), rows, dim, codec_of(PLAIN))
        parts.append(rows_KD.reshape(-1))
    return _joined(parts, np.float32)


def _float32(encoded: Bytes) -> Floats:
    """The bytes as values, as writeable as they are; a copy only where they are not aligned.

    Raises CorruptMessage when they are no whole number of values."""
    if encoded.size % 4:
        raise CorruptMessage(f"{encoded.size} bytes are no float32 values")
    return encoded.view(np.float32) if encoded.ctypes.data % 4 == 0 else encoded.copy().view(np.float32)


def _joined(parts: Sequence[npt.NDArray[T]], dtype: type[T]) -> npt.NDArray[T]:
    """The arrays as one; the only array itself."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
