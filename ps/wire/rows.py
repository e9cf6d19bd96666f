"""Rows of several tables between flat float32 arrays and the bytes of a message, by the format of each table.

A format is a number on the wire: the tag of a codec, and a bit if a second moment follows each row. A section is a
packet of its rows, and behind it the moments where the packet has a length of its own. Codecs work on rows of one
width, so sections of equal format and dim that follow each other are coded in one call.
"""
# T = tables of the job, S = sections, K = rows, D = embedding dim, R = bytes of an encoded row, B = R and a moment

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Bytes, Floats, Ids, Ints, UInt64s
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codecs import Codecs, NamedCodec
from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.floats import saturated_values
from shardkeep.compression.values.moments import decode_moments, encode_moments
from shardkeep.compression.values.registry import PUSH_TAG
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.server.table.initializers.initial import table_key
from shardkeep.ps.wire.message import Packed

T = TypeVar("T", bound=np.generic)
PLAIN = 0
"""The format of the float32 rows themselves."""
MOMENTS = 64
"""The bit of a format that says that a second moment follows each row."""
_DIM_BITS = 32
"""A format and a dim are one key: the dim has these bits."""


class _Run(NamedTuple):
    """Consecutive sections of one format and dim, whose rows are coded in one call."""

    key: int
    named: NamedCodec
    dim: int
    has_moments: bool
    sections: slice
    rows: int


class RowReader:
    """Reads the rows of messages, by the tables' dims and the job's codecs. Its methods raise CorruptMessage."""

    def __init__(self, catalog: Catalog, compression: CompressionConfig, import_from: Path | None = None) -> None:
        """`import_from`: folder that is searched last for codecs. Raises ConfigError for one that cannot be loaded."""
        self.catalog = catalog
        self._codecs = Codecs(compression, import_from)
        self._widths: dict[int, int] = {}

    def split(self, key: int) -> tuple[NamedCodec, int, bool]:
        """The codec and the dim of a key, and whether there are moments. Raises CorruptMessage for an unknown codec."""
        row_format, dim = key >> _DIM_BITS, key & (1 << _DIM_BITS) - 1
        return self._codecs[row_format & ~MOMENTS], dim, bool(row_format & MOMENTS)

    def width(self, key: int) -> int:
        """Bytes of an encoded row with its moment."""
        if key not in self._widths:
            named, dim, has_moments = self.split(key)
            self._widths[key] = named.codec.row_bytes(dim) + has_moments
        return self._widths[key]

    def runs(self, keys_S: Ints, rows_S: Ints) -> list[_Run]:
        """The longest runs of sections with one key, a format and a dim."""
        if not rows_S.size:
            return []
        alike = (keys_S == keys_S[0]).all()  # a tenth of the time of the other way
        starts = [0] if alike else [0, *(np.flatnonzero(np.diff(keys_S)) + 1).tolist()]
        parts = zip(keys_S[starts].tolist(), starts, [*starts[1:], rows_S.size], strict=True)
        sums = np.add.reduceat(rows_S, starts).tolist()
        return [
            _Run(key, *self.split(key), slice(start, end), rows)
            for (key, start, end), rows in zip(parts, sums, strict=True)
        ]

    def parted(self, encoded: Bytes, key: int, rows: int, *, has_moments: bool) -> tuple[Bytes, Bytes | None]:
        """Encoded rows, contiguous (K, R), and their moments."""
        encoded_KB = encoded.reshape(rows, self.width(key))
        if not has_moments:
            return encoded_KB, None
        return np.ascontiguousarray(encoded_KB[:, :-1]), encoded_KB[:, -1]

    def decode(self, packed: Packed) -> Floats:
        """The rows of all sections, flat float32, aligned; those of the sections that `moments_of` names have their
        mean squares behind them. May share memory with the message."""
        keys_S = self._checked(packed)
        if not packed.value_formats_S.any():
            return _float32(packed.values_area)
        parts = []
        for run in self.runs(keys_S, packed.rows_S):
            packets, codec = list(self._packets(packed, run)), run.named.codec
            encoded_KR = _joined([codec.unpack(packet, rows, run.dim) for packet, rows, _ in packets], np.uint8)
            values_KW = codec.decode(encoded_KR, run.dim)
            if run.has_moments:
                moments_K = _joined([moments for *_, moments in packets if moments is not None], np.uint8)
                values_KW = np.column_stack([values_KW, decode_moments(moments_K)])
            parts.append(values_KW.reshape(-1))
        return _joined(parts, np.float32)

    def parts(self, packed: Packed) -> dict[str, int]:
        """Bytes of a message's sections that are no values, by part of the ledger."""
        parts: Counter[str] = Counter()
        for run in self.runs(self._checked(packed), packed.rows_S) if packed.value_formats_S.any() else ():
            for packet, rows, _ in self._packets(packed, run):
                parts.update(run.named.codec.parts(packet, rows, run.dim))
            parts["moments"] += run.rows * run.has_moments
        return {part: size for part, size in parts.items() if size}

    def _checked(self, packed: Packed) -> Ints:
        """The key of each section. Raises CorruptMessage for one that has not the bytes of its rows."""
        rows_S, formats_S, dims_S = packed.rows_S, packed.value_formats_S, self.catalog.dims_T[packed.tables_S]
        keys_S: Ints = formats_S << _DIM_BITS | dims_S
        widths_S = np.array(list(map(self.width, keys_S.tolist()))) if formats_S.any() else 4 * dims_S
        for s in np.flatnonzero(packed.value_sizes != rows_S * widths_S).tolist():
            named, dim, _ = self.split(int(keys_S[s]))
            if not named.packs:
                raise CorruptMessage(
                    f"table {self.catalog.names[packed.tables_S[s]]}: {packed.value_sizes[s]} bytes of "
                    f"{named.name} values for {rows_S[s]} rows of {dim}"
                )
        return keys_S

    def _packets(self, packed: Packed, run: _Run) -> Iterator[tuple[Bytes, int, Bytes | None]]:
        """The packets of a run, with the rows of each and their moments: one where rows have a fixed length."""
        if not run.named.packs:
            area = packed.buffer[packed.values_at_S1[run.sections.start] : packed.values_at_S1[run.sections.stop]]
            encoded_KR, moments_K = self.parted(area, run.key, run.rows, has_moments=run.has_moments)
            yield encoded_KR.reshape(-1), run.rows, moments_K
            return
        for s in range(run.sections.start, run.sections.stop):
            section, rows = packed.values_of(s), int(packed.rows_S[s])
            cut = section.size - rows * run.has_moments
            if cut < 0:
                raise CorruptMessage(f"{section.size} bytes of {rows} rows and their moments")
            yield section[:cut], rows, section[cut:] if run.has_moments else None


class RowFormats:
    """Encodes rows, each table's in its format.

    Args:
        reader: Of the same job.
        formats_T: Of each table.
        seed: Of the job's random numbers.
        sender: As of `Draws`.
    """

    def __init__(self, reader: RowReader, formats_T: Sequence[int], *, seed: int = 0, sender: int = 0) -> None:
        self._reader, catalog = reader, reader.catalog
        self.tags_T: Ints = np.array(formats_T, dtype=np.int64)
        """Number on the wire of each table's format."""
        self._keys_T = self.tags_T << _DIM_BITS | catalog.dims_T
        self.widths_T: Ints = np.array(list(map(reader.width, self._keys_T.tolist())), dtype=np.int64)
        """Bytes of one encoded row of each table."""
        self.plain = not self.tags_T.any()
        """Whether the bytes are the float32 rows themselves."""
        self.packs = any(reader.split(key)[0].packs for key in set(self._keys_T.tolist()))
        """Whether sections have other bytes than their encoded rows, so that `pack` makes them."""
        self._moments_T: Bools = (self.tags_T & MOMENTS) > 0
        keys = [table_key(seed, name) if max(formats_T) >= PUSH_TAG else 0 for name in catalog.names]  # only plugs draw
        self._random_T: UInt64s = np.array(keys, dtype=np.uint64)
        self._sender = sender

    def encode(self, flat: Floats, rows_S: Ints, ids_V: Ids, step: int, tables_S: Ints | None = None) -> Bytes:
        """The rows of all sections, each with its mean square behind it if its format has moments, as flat uint8. May
        share memory with `flat`. `ids_V`: of the rows. `tables_S` None = a section of every table."""
        if self.plain:
            return flat.view(np.uint8)
        tables_S = np.arange(self.tags_T.size) if tables_S is None else tables_S
        parts, at, row = [], 0, 0
        for run in self._reader.runs(self._keys_T[tables_S], rows_S):
            width = run.dim + run.has_moments
            values_KW = flat[at : at + run.rows * width].reshape(run.rows, width)
            keys_S, ids_K = self._random_T[tables_S[run.sections]], ids_V[row : row + run.rows]
            draws = Draws(keys_S, rows_S[run.sections], ids_K, step=step, sender=self._sender)
            encoded = run.named.codec.encode(np.ascontiguousarray(values_KW[:, : run.dim]), draws)
            if run.has_moments:
                encoded = np.column_stack([encoded, encode_moments(values_KW[:, run.dim])])
            parts.append(encoded.reshape(-1))
            at, row = at + values_KW.size, row + run.rows
        return _joined(parts, np.uint8)

    def pack(self, encoded: Bytes, rows_S: Ints, tables_S: Ints) -> tuple[Bytes, Ints]:
        """The bytes of all sections, from their encoded rows, and how many each has."""
        sizes_S = rows_S * self.widths_T[tables_S]
        if not self.packs:
            return encoded, sizes_S
        sections = np.split(encoded, np.cumsum(sizes_S[:-1])) if sizes_S.size else []
        for s, (rows, key) in enumerate(zip(rows_S.tolist(), self._keys_T[tables_S].tolist(), strict=True)):
            named, dim, has_moments = self._reader.split(key)
            if named.packs:
                encoded_KR, moments_K = self._reader.parted(sections[s], key, rows, has_moments=has_moments)
                packet = named.codec.pack(encoded_KR, dim)
                sections[s] = packet if moments_K is None else np.concatenate([packet, moments_K])
        return _joined(sections, np.uint8), np.array([section.size for section in sections], dtype=np.int64)

    def decode(self, encoded: Bytes, rows_S: Ints) -> Floats:
        """Undoes `encode` of a section of every table, without the moments."""
        if self.plain:
            return _float32(encoded)
        runs = self._encoded_runs(encoded, rows_S)
        return _joined([run.named.codec.decode(rows, run.dim).reshape(-1) for run, rows in runs], np.float32)

    def with_moments(self, flat: Floats, squares_K: Floats, rows_T: Ints) -> Floats:
        """Rows of all tables as `encode` takes them, from the rows and what the moments are made of."""
        if not self._moments_T.any():
            return flat
        moments_K, ends_K = (
            np.repeat(self._moments_T, rows_T),
            np.cumsum(np.repeat(self._reader.catalog.dims_T, rows_T)),
        )
        return np.insert(flat, ends_K[moments_K], squares_K[moments_K])

    def saturated_values(self, encoded: Bytes, rows_S: Ints) -> int:
        """How many values of a section of every table are the largest of a 16-bit format: they may have been larger."""
        runs = [] if self.plain else self._encoded_runs(encoded, rows_S)
        return sum(saturated_values(run.named.codec, encoded_KR) for run, encoded_KR in runs)

    def _encoded_runs(self, encoded: Bytes, rows_S: Ints) -> Iterator[tuple[_Run, Bytes]]:
        at = 0
        for run in self._reader.runs(self._keys_T, rows_S):
            part = encoded[at : at + run.rows * self._reader.width(run.key)]
            yield run, self._reader.parted(part, run.key, run.rows, has_moments=run.has_moments)[0]
            at += part.size


def moments_of(packed: Packed) -> Bools:
    """Whether a second moment follows each row, for each section."""
    return np.asarray((packed.value_formats_S & MOMENTS) > 0)


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
