"""Values of several tables between flat float32 arrays and the bytes of a message, by one codec.

Codecs work on rows of one width, so tables of equal dim that follow each other are coded in one call.
"""
# S = sections, K = rows, D = embedding dim

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.codec import ValueCodec, value_codec
from shardkeep.ps.message import Bytes, Packed
from shardkeep.ps.slab import Catalog

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


def widths(codec: ValueCodec, catalog: Catalog) -> Ints:
    """Bytes of one encoded row per table."""
    return np.array([codec.row_bytes(dim) for dim in catalog.dims_T.tolist()], dtype=np.int64)


def encode(codec: ValueCodec, values: Floats, rows_S: Ints, tables_S: Ints | None, catalog: Catalog) -> Bytes:
    """The encoded rows of all sections, flat uint8; None = a section of every table. May share memory with `values`."""
    parts, at = [], 0
    for rows, dim in _runs(rows_S, tables_S, catalog):
        parts.append(codec.encode(values[at : at + rows * dim].reshape(rows, dim)).reshape(-1))
        at += rows * dim
    return _joined(parts, np.uint8)


def decode(packed: Packed, catalog: Catalog) -> Floats:
    """The rows of all sections, flat float32, aligned. May share memory with the message.

    Raises CorruptMessage when a section has not the bytes that its rows need, or an unknown format."""
    formats = packed.value_formats_S
    if not formats.size:
        return np.empty(0, dtype=np.float32)
    if (formats != formats[0]).any():
        return _joined([_decode_section(packed, s, catalog) for s in range(formats.size)], np.float32)
    codec = value_codec(int(formats[0]))
    if catalog.one_dim is not None:
        width: Ints | int = codec.row_bytes(catalog.one_dim)
    else:
        width = widths(codec, catalog)[packed.tables_S]
    wrong = packed.value_bytes_S != packed.rows_S * width
    if wrong.any():
        _decode_section(packed, int(wrong.argmax()), catalog)  # raises
    parts, at, area = [], 0, packed.values_area
    for rows, dim in _runs(packed.rows_S, packed.tables_S, catalog):
        size = rows * codec.row_bytes(dim)
        parts.append(codec.decode(area[at : at + size], dim).reshape(-1))
        at += size
    return _joined(parts, np.float32)


def _decode_section(packed: Packed, s: int, catalog: Catalog) -> Floats:
    section = packed.section(s)
    codec, dim = value_codec(section.value_format), int(catalog.dims_T[section.table])
    if section.values.size != section.rows * codec.row_bytes(dim):
        raise CorruptMessage(
            f"table {catalog.names[section.table]}: {section.values.size} bytes of {codec.name} values "
            f"for {section.rows} rows of {dim}"
        )
    return codec.decode(section.values, dim).reshape(-1)


def _runs(rows_S: Ints, tables_S: Ints | None, catalog: Catalog) -> list[tuple[int, int]]:
    """(rows, dim) of each longest run of sections with one dim."""
    if not rows_S.size:
        return []
    if catalog.one_dim is not None:
        return [(int(rows_S.sum()), catalog.one_dim)]
    dims_S = catalog.dims_T if tables_S is None else catalog.dims_T[tables_S]
    starts = [0, *(np.flatnonzero(np.diff(dims_S)) + 1).tolist()]
    return list(zip(np.add.reduceat(rows_S, starts).tolist(), dims_S[starts].tolist(), strict=True))


def _joined(parts: Sequence[npt.NDArray[T]], dtype: type[T]) -> npt.NDArray[T]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
