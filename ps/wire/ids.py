"""The ids of a message's sections, written and read: as they are, or coded."""
# S = sections, V = ids of all sections, K = ids sent, T = tables

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bools, Bytes, Ints
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.ps.jagged import Catalog, SectionIds
from shardkeep.ps.wire import message_kernels
from shardkeep.ps.wire.message import Packed

MOST_IDS = 1 << 24
"""Coded ids that one message may hold: a few bytes can represent many."""
ROW_BITS = 32
"""The id format of an answer: a bit for each requested id of all sections, without gaps. The last section has all
bytes. The other formats are those of compression/ids."""


@dataclass(frozen=True, slots=True)
class EncodedIds:
    """Columns of the directory, and the bytes of all sections' ids."""

    tables_S: Ints
    rows_S: Ints
    id_formats_S: Ints
    id_bytes_S: Ints
    area: Bytes

    @property
    def directory(self) -> dict[str, Any]:
        """As `allocate` takes them."""
        return {name: getattr(self, name) for name in ("tables_S", "rows_S", "id_formats_S", "id_bytes_S")}


# ---- ids ----


def write_ids(counts_T: Ints, ids_K: Ints, *, coded: bool) -> EncodedIds:
    """Ids of some tables, table after table; `counts_T`: how many each table has."""
    tables_S = np.flatnonzero(counts_T)
    rows_S = counts_T[tables_S]
    if not coded:
        return EncodedIds(tables_S, rows_S, np.zeros_like(rows_S), 8 * rows_S, ids_K.view(np.uint8))
    from shardkeep.compression.ids.codes import encode_ids  # here: only jobs with coded ids load their kernels

    codes = encode_ids(_starts(rows_S), ids_K)
    return EncodedIds(tables_S, rows_S, codes.formats_S, codes.sizes_S, codes.area)


def read_ids(packed: Packed, catalog: Catalog) -> SectionIds:
    """The ids of all sections. May share memory with the message.

    Raises CorruptMessage, or ProtocolError for a table that is not there."""
    tables_S, rows_S, area = packed.tables_S, packed.rows_S, packed.ids_area
    if tables_S.size and int(tables_S[-1]) >= len(catalog):
        raise ProtocolError(f"table {int(tables_S[-1])} of {len(catalog)}")
    formats_S, sizes_S = packed.id_formats_S, packed.id_sizes
    if formats_S.any():
        from shardkeep.compression.ids.codes import decode_ids  # here: as above

        return SectionIds(tables_S, _starts(rows_S), decode_ids(formats_S, rows_S, sizes_S, area, MOST_IDS))
    wrong = sizes_S != 8 * rows_S
    if wrong.any():
        s = int(wrong.argmax())
        name = catalog.names[int(tables_S[s])]
        raise CorruptMessage(f"table {name}: {sizes_S[s]} bytes of ids for {rows_S[s]} rows")
    starts_S1, ids_V = _starts(rows_S), for_kernels(area.view(np.int64), np.int64)
    at = message_kernels.first_disorder(starts_S1, ids_V)
    if at >= 0:
        table = int(tables_S[int(np.searchsorted(starts_S1, at, side="right")) - 1])
        raise CorruptMessage(f"table {catalog.names[table]}: id {ids_V[at]} follows {ids_V[at - 1]}; ids must rise")
    return SectionIds(tables_S, starts_S1, ids_V)


# ---- which ids have rows ----


def row_bit_bytes(starts_S1: Ints) -> Ints:
    """Bytes of bits by section."""
    bytes_S = np.zeros(starts_S1.size - 1, dtype=np.int64)
    bytes_S[-1:] = -(-starts_S1[-1] // 8)
    return bytes_S


def write_row_bits(has_row_V: Bools) -> Bytes:
    """The bits of all sections."""
    return np.packbits(has_row_V, bitorder="little")


def read_row_bits(packed: Packed, rows_S: Ints) -> Bools:
    """Whether each of `rows_S` requested ids of the sections has a row, bool (V,). Raises CorruptMessage."""
    starts_S1 = _starts(rows_S)
    bits, count = np.unpackbits(packed.ids_area, bitorder="little").view(np.bool_), int(starts_S1[-1])
    fitting = (packed.id_formats_S == ROW_BITS).all() and np.array_equal(packed.id_sizes, row_bit_bytes(starts_S1))
    if not fitting or bits[count:].any():
        raise CorruptMessage(
            f"{packed.ids_area.size} bytes that say which of {count} ids have rows; allowed: a bit for each"
        )
    return bits[:count]


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
