"""The ids of a message's sections, written and read: as they are, coded, or as references to those of a pull.

A push may have two sections of a table: first come those by reference, table after table, then those with ids.
"""
# S = sections, V = ids of all sections, K = ids sent, T = tables

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Bytes, Ints
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.ps.jagged import Catalog, SectionIds
from shardkeep.ps.placement import Split
from shardkeep.ps.wire import message_kernels
from shardkeep.ps.wire.message import REFERENCE, Packed

MOST_IDS = 1 << 24
"""Coded ids that one message may hold: a few bytes can represent many."""
ROW_BITS = 32
"""The id format of an answer to a READ: a bit for each requested id, without gaps. A section has the bytes that begin
in it. The other formats are those of compression/ids."""


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


def read_ids(packed: Packed, catalog: Catalog, first: int = 0) -> SectionIds:
    """The sections with ids, from section `first` on. May share memory with the message.

    Raises CorruptMessage, or ProtocolError for a table that is not there."""
    _check_tables(packed, catalog, first, packed.tables_S.size)
    tables_S, rows_S = packed.tables_S[first:], packed.rows_S[first:]
    formats_S, sizes_S = packed.id_formats_S[first:], packed.id_sizes[first:]
    area = packed.buffer[packed.ids_at_S1[first] : packed.ids_at_S1[-1]]
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


# ---- the part of the ids that exists ----


def write_present(sections: SectionIds, there_V: npt.NDArray[np.bool_]) -> EncodedIds:
    """Which of the ids of a pull have rows: their places in each section."""
    rows_S = np.diff(sections.starts_S1)
    places_V = np.arange(there_V.size) - np.repeat(sections.starts_S1[:-1], rows_S)
    there_S = np.diff(np.concatenate([[0], np.cumsum(there_V)])[sections.starts_S1])
    return _subsets(sections.tables_S, there_S, places_V[there_V], rows_S)


def _subsets(tables_S: Ints, rows_S: Ints, places_K: Ints, among_S: Ints) -> EncodedIds:
    """Rows of some tables by their places among `among_S` rows of each."""
    from shardkeep.compression.ids.codes import encode_subsets  # here: as above

    codes = encode_subsets(_starts(rows_S), places_K, among_S)
    return EncodedIds(tables_S, rows_S, codes.formats_S, codes.sizes_S, codes.area)


def read_present(packed: Packed, rows_S: Ints) -> npt.NDArray[np.bool_] | None:
    """Which of the ids of a pull with `rows_S` ids in its sections have rows, bool (V,); None = all of them.

    Raises CorruptMessage."""
    if not packed.id_formats_S.any():
        check_complete(packed, rows_S)
        return None
    from shardkeep.compression.ids.codes import decode_subsets  # here: as above

    count = int(rows_S.sum())
    places_K = decode_subsets(packed.id_formats_S, packed.rows_S, packed.id_sizes, packed.ids_area, rows_S, count)
    if places_K.size == count:
        return None
    there_V = np.zeros(count, dtype=np.bool_)
    there_V[places_K + np.repeat(np.cumsum(rows_S) - rows_S, packed.rows_S)] = True
    return there_V


def check_complete(packed: Packed, rows_S: Ints) -> None:
    """Raises CorruptMessage unless a reply has all `rows_S` rows of its sections and names no ids."""
    if packed.ids_area.size or packed.id_formats_S.any() or not np.array_equal(packed.rows_S, rows_S):
        raise CorruptMessage(
            f"{packed.kind.name} with {packed.rows_S.sum()} rows and {packed.ids_area.size} bytes of ids; "
            f"allowed: all {rows_S.sum()} rows that were requested, without ids"
        )


def row_bit_bytes(starts_S1: Ints) -> Ints:
    """Bytes of each section's bits."""
    return np.diff(-(-starts_S1 // 8))


def write_row_bits(has_row_V: Bools) -> Bytes:
    """The bits of all sections."""
    return np.packbits(has_row_V, bitorder="little")


def read_row_bits(packed: Packed) -> Bools:
    """Whether each id of the sections has a row, bool (V,). Raises CorruptMessage."""
    starts_S1 = _starts(packed.rows_S)
    bits, count = np.unpackbits(packed.ids_area, bitorder="little").view(np.bool_), int(starts_S1[-1])
    fitting = (packed.id_formats_S == ROW_BITS).all() and np.array_equal(packed.id_sizes, row_bit_bytes(starts_S1))
    if not fitting or bits[count:].any():
        raise CorruptMessage(
            f"{packed.ids_area.size} bytes that say which of {count} ids have rows; allowed: a bit for each"
        )
    return bits[:count]


# ---- references ----


def write_references(counts_T: Ints, places_K: Ints, pulled_T: Ints) -> EncodedIds:
    """Rows by their places among those of their table that the named pulls requested of the server, `pulled_T` many."""
    tables_S = np.flatnonzero(counts_T)
    return _subsets(tables_S, counts_T[tables_S], places_K, pulled_T[tables_S])


def num_references(packed: Packed) -> int:
    """How many sections are by reference. Raises CorruptMessage unless they come first."""
    referring = packed.id_formats_S >= REFERENCE
    count = int(referring.sum())
    if not referring[:count].all():
        raise CorruptMessage("sections by reference follow sections with ids; they come first")
    return count


def read_references(packed: Packed, catalog: Catalog, count: int, pulled: SectionIds | None) -> tuple[SectionIds, Ints]:
    """The first `count` sections, which refer to the ids of the pulls that the push names, and where each id stands
    among those. Raises as `read_ids`, and ProtocolError when a pull is not known."""
    _check_tables(packed, catalog, 0, count)
    if not pulled:
        raise ProtocolError(
            f"worker {packed.rank} pushed step {packed.step} by reference to a pull that is not known here"
        )
    tables_S, rows_S = packed.tables_S[:count], packed.rows_S[:count]
    where_S = np.searchsorted(pulled.tables_S, tables_S)
    if not np.array_equal(pulled.tables_S[np.minimum(where_S, pulled.tables_S.size - 1)], tables_S):
        raise CorruptMessage(f"worker {packed.rank} refers to tables that its pull of step {packed.step} left out")
    from shardkeep.compression.ids.codes import decode_subsets  # here: as above

    area = packed.buffer[packed.ids_at_S1[0] : packed.ids_at_S1[count]]
    pulled_S = np.diff(pulled.starts_S1)[where_S]
    places_K = decode_subsets(packed.id_formats_S[:count], rows_S, packed.id_sizes[:count], area, pulled_S, MOST_IDS)
    at_K = places_K + np.repeat(pulled.starts_S1[where_S], rows_S)
    return SectionIds(tables_S, _starts(rows_S), pulled.ids_V[at_K]), at_K


def joined(first: EncodedIds, second: EncodedIds) -> EncodedIds:
    """The sections of both, one after the other."""
    columns = (first.directory | {"area": first.area}).items()
    return EncodedIds(**{name: np.concatenate([column, getattr(second, name)]) for name, column in columns})


def places(split: Split, num_ids: int) -> Ints:
    """Where each id of a split stands among those of its table and server, int64 (V,)."""
    places_V = np.empty(num_ids, dtype=np.int64)
    for server, counts_T in enumerate(split.counts_ST):
        within = np.arange(split.count(server)) - np.repeat(_starts(counts_T)[:-1], counts_T)
        positions = split.positions(server)
        places_V[slice(None) if positions is None else positions] = within
    return places_V


def _check_tables(packed: Packed, catalog: Catalog, first: int, end: int) -> None:
    """Raises unless the tables of these sections are there, rise and none stands twice."""
    tables_S = packed.tables_S[first:end]
    if tables_S.size and int(tables_S.max()) >= len(catalog):
        raise ProtocolError(f"table {int(tables_S.max())} of {len(catalog)}")
    if (disorder_S := tables_S[1:] <= tables_S[:-1]).any():
        s = int(disorder_S.argmax())
        raise CorruptMessage(
            f"{packed.kind.name}: table {tables_S[s + 1]} follows table {tables_S[s]}; "
            "tables rise and none stands twice"
        )


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
