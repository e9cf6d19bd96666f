"""Values of several tables between flat float32 arrays and the bytes of a message, by one codec.

Codecs work on rows of one width, so tables of equal dim that follow each other are coded in one call. A second moment
may follow each row's bytes.
"""
# S = sections, K = rows, D = embedding dim

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes, Floats, Ints, UInt64s
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values import elements
from shardkeep.compression.values.codec import ValueCodec, value_codec
from shardkeep.compression.values.floats import Half, saturated_values
from shardkeep.compression.values.moments import decode_moments, encode_moments
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.wire.message import Packed

T = TypeVar("T", bound=np.generic)

ELEMENTS = 96
"""A value format: single elements of rows, each section a packet on its own (compression/values/elements.py)."""
_MOMENTS = 128  # the bit of a value format that says that a second moment follows each row


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows are written: their codec, and whether a second moment follows each."""

    codec: ValueCodec
    moments: bool = False

    @classmethod
    def of_tag(cls, tag: int) -> RowFormat:
        """Raises CorruptMessage for a tag that no codec has."""
        return PLAIN if tag == PLAIN.tag else cls(value_codec(tag & ~_MOMENTS), bool(tag & _MOMENTS))

    @property
    def tag(self) -> int:
        """Number on the wire."""
        return self.codec.tag | (_MOMENTS if self.moments else 0)

    @property
    def plain(self) -> bool:
        """Whether the bytes are the float32 rows themselves."""
        return self.codec.name == "fp32" and not self.moments

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values."""
        return 4 * dim if self.plain else self.codec.row_bytes(dim) + self.moments

    def widths(self, catalog: Catalog) -> Ints:
        """Bytes of one row per table."""
        return np.array([self.row_bytes(dim) for dim in catalog.dims_T.tolist()], dtype=np.int64)

    def encode(
        self,
        flat: Floats,
        rows_S: Ints,
        tables_S: Ints | None,
        catalog: Catalog,
        *,
        squares_K: Floats | None = None,
        keys_K: UInt64s | None = None,
    ) -> Bytes:
        """The rows of all sections, flat uint8; `tables_S` None = a section of every table. May share memory with
        `flat`. `squares_K`: what the moments are made of; `keys_K`: of stochastic rounding, None = to the nearest."""
        if self.plain:
            return flat.view(np.uint8)
        parts, at, row = [], 0, 0
        for rows, dim in _runs(rows_S, tables_S, catalog):
            keys = None if keys_K is None else keys_K[row : row + rows]
            encoded = self.codec.encode(flat[at : at + rows * dim].reshape(rows, dim), keys)
            if self.moments:
                assert squares_K is not None
                encoded = np.column_stack([encoded, encode_moments(squares_K[row : row + rows])])
            parts.append(encoded.reshape(-1))
            at, row = at + rows * dim, row + rows
        return joined(parts, np.uint8)

    def saturated_values(self, encoded: Bytes, rows_S: Ints, catalog: Catalog, tables_S: Ints | None = None) -> int:
        """How many values are the largest of a 16-bit format: they may have been larger. `tables_S`: as in `encode`."""
        if not self.moments or not isinstance(self.codec, Half):
            return saturated_values(self.codec, encoded)
        total, at = 0, 0
        for rows, dim in _runs(rows_S, tables_S, catalog):
            size = rows * self.row_bytes(dim)
            values_KB = encoded[at : at + size].reshape(rows, self.row_bytes(dim))[:, :-1]
            total += saturated_values(self.codec, np.ascontiguousarray(values_KB))
            at += size
        return total

    def decode(self, encoded: Bytes, rows_S: Ints, tables_S: Ints | None, catalog: Catalog) -> tuple[Floats, Floats]:
        """The rows of all sections, flat float32, and their second moments (K,), none where there are none. May share
        memory with the input. Raises CorruptMessage when the bytes are not those of so many rows."""
        if self.plain:
            return _float32(encoded), _NO_SQUARES
        parts, squares, at = [], [], 0
        for rows, dim in _runs(rows_S, tables_S, catalog):
            size = rows * self.row_bytes(dim)
            part = encoded[at : at + size]
            at += size
            if self.moments:
                if part.size != size:
                    raise CorruptMessage(f"{encoded.size} bytes of {self.codec.name} values and moments end too early")
                part_KB = part.reshape(rows, self.row_bytes(dim))
                squares.append(decode_moments(part_KB[:, -1]))
                part = np.ascontiguousarray(part_KB[:, :-1])
            parts.append(self.codec.decode(part, dim).reshape(-1))
        return joined(parts, np.float32), joined(squares, np.float32)


PLAIN = RowFormat(value_codec("fp32"))
"""The float32 rows themselves."""
_NO_SQUARES: Floats = np.empty(0, dtype=np.float32)


def decode(packed: Packed, catalog: Catalog) -> tuple[Floats, Floats]:
    """The rows of all sections, flat float32, aligned, and their second moments, as of `joined_squares`. May share
    memory with the message.

    Raises CorruptMessage when a section has not the bytes that its rows need, or an unknown format."""
    formats = packed.value_formats_S
    if not formats.size:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float32)
    if (formats == formats[0]).all():
        return _decode_sections(packed, slice(0, formats.size), catalog)
    if (formats == ELEMENTS).any():
        raise CorruptMessage(f"sections with value formats {sorted(set(formats.tolist()))}; allowed: {ELEMENTS} alone")
    bounds = [0, *(np.flatnonzero(np.diff(formats)) + 1).tolist(), formats.size]
    runs = [slice(first, end) for first, end in itertools.pairwise(bounds)]
    parts = [_decode_sections(packed, run, catalog) for run in runs]
    squares = [(squares_K, int(packed.rows_S[run].sum())) for (_, squares_K), run in zip(parts, runs, strict=True)]
    return joined([flat for flat, _ in parts], np.float32), joined_squares(squares)


def joined_squares(parts: Sequence[tuple[Floats, int]]) -> Floats:
    """The second moments of parts, each with its number of rows: NaN for the rows of a part without moments; empty
    where no part has any."""
    if not any(squares_K.size for squares_K, _ in parts):
        return _NO_SQUARES
    filled = [squares_K if squares_K.size else np.full(rows, np.nan, np.float32) for squares_K, rows in parts]
    return joined(filled, np.float32)


def _decode_sections(packed: Packed, run: slice, catalog: Catalog) -> tuple[Floats, Floats]:
    """As `decode`, of consecutive sections with one format."""
    tag, rows_S, tables_S = int(packed.value_formats_S[run.start]), packed.rows_S[run], packed.tables_S[run]
    if tag == ELEMENTS:
        return _decode_elements(packed, catalog), _NO_SQUARES
    row_format = RowFormat.of_tag(tag)
    if catalog.one_dim is not None:
        width: Ints | int = row_format.row_bytes(catalog.one_dim)
    else:
        width = row_format.widths(catalog)[tables_S]
    wrong = packed.value_bytes_S[run] != rows_S * width
    if wrong.any():
        s = run.start + int(wrong.argmax())
        table = int(packed.tables_S[s])
        raise CorruptMessage(
            f"table {catalog.names[table]}: {packed.value_bytes_S[s]} bytes of {row_format.codec.name} values "
            f"for {packed.rows_S[s]} rows of {catalog.dims_T[table]}"
        )
    values = packed.buffer[packed.values_at_S1[run.start] : packed.values_at_S1[run.stop]]
    return row_format.decode(values, rows_S, tables_S, catalog)


def encode_elements(flat: Floats, rows_S: Ints, tables_S: Ints, catalog: Catalog, codec: ValueCodec) -> list[Bytes]:
    """A packet for each section, of the values that are not zero."""
    packets, at = [], 0
    for rows, dim in zip(rows_S.tolist(), catalog.dims_T[tables_S].tolist(), strict=True):
        rows_KD = flat[at : at + rows * dim].reshape(rows, dim)
        packets.append(elements.encode(rows_KD, rows_KD != 0.0, codec))
        at += rows * dim
    return packets


def elements_of(packed: Packed) -> int:
    """How many elements a message of them has."""
    return sum(elements.count_of(packed.section(s).values) for s in range(packed.tables_S.size))


def _decode_elements(packed: Packed, catalog: Catalog) -> Floats:
    parts = []
    for s, rows in enumerate(packed.rows_S.tolist()):
        section = packed.section(s)
        rows_KD, _ = elements.decode(section.values, rows, int(catalog.dims_T[section.table]), value_codec("fp32"))
        parts.append(rows_KD.reshape(-1))
    return joined(parts, np.float32)


def _float32(encoded: Bytes) -> Floats:
    """The bytes as values, as writeable as they are; a copy only where they are not aligned.

    Raises CorruptMessage when they are no whole number of values."""
    if encoded.size % 4:
        raise CorruptMessage(f"{encoded.size} bytes are no float32 values")
    return encoded.view(np.float32) if encoded.ctypes.data % 4 == 0 else encoded.copy().view(np.float32)


def _runs(rows_S: Ints, tables_S: Ints | None, catalog: Catalog) -> list[tuple[int, int]]:
    """(rows, dim) of each longest run of sections with one dim."""
    if not rows_S.size:
        return []
    if catalog.one_dim is not None:
        return [(int(rows_S.sum()), catalog.one_dim)]
    dims_S = catalog.dims_T if tables_S is None else catalog.dims_T[tables_S]
    starts = [0, *(np.flatnonzero(np.diff(dims_S)) + 1).tolist()]
    return list(zip(np.add.reduceat(rows_S, starts).tolist(), dims_S[starts].tolist(), strict=True))


def joined(parts: Sequence[npt.NDArray[T]], dtype: type[T]) -> npt.NDArray[T]:
    """The arrays as one; the only array itself."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
