"""From a packed request to sections and gradients. A message is wholly valid before any of it is used.

Knows the tables' specs only: no rows, no gate.
"""
# S = sections, V = ids of all sections, K = ids of the sections by reference

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.compression.values.codec import value_codec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.shard.table import table_kernels
from shardkeep.ps.shard.table.table import plain
from shardkeep.ps.shard.tables import Gradients, Pulled, Sections, sum_of
from shardkeep.ps.wire import rows as values
from shardkeep.ps.wire.message import REFERENCE, Bytes, Kind, Packed, allocate

Ints = npt.NDArray[np.int64]

MOST_IDS = 1 << 24
"""Coded ids that one message may hold: a few bytes can stand for many."""


class Decoder:
    """Decodes requests to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def wanted(self, packed: Packed) -> Sections:
        """The ids of a PULL or READ."""
        if packed.value_bytes_S.any():
            raise CorruptMessage(f"{packed.kind.name} with {int(packed.value_bytes_S.sum())} bytes of values")
        self._check_tables(packed, 0, packed.tables_S.size)
        return self._ids(packed, 0)

    def gradients(self, packed: Packed, pulled: Pulled | None) -> Gradients:
        """The ids and gradients of a PUSH; the arrays may be views of the message.

        `pulled`: what the same rank's pull of the step found: a push of the same ids needs no check and no second
        search, and one by reference has no others."""
        referring = packed.id_formats_S >= REFERENCE
        count = int(referring.sum())
        if not referring[:count].all():
            raise CorruptMessage("sections by reference follow sections with ids; they come first")
        self._check_tables(packed, 0, count)
        self._check_tables(packed, count, packed.tables_S.size)
        found = self._references(packed, count, pulled) if count else None
        sections = self._ids(packed, count)
        flat, squares_V = values.decode(packed, self._catalog)
        flat = plain(flat, np.float32)
        if found is None:
            if pulled is not None and sections.same(pulled.sections):
                return Gradients(pulled.sections, flat, pulled, squares_V)
            return Gradients(sections, flat, None, squares_V)
        rows = found.sections.ids_V.size
        at = int((packed.rows_S[:count] * self._catalog.dims_T[packed.tables_S[:count]]).sum())
        first = Gradients(found.sections, flat[:at], found, squares_V[:rows])
        if count == packed.tables_S.size:
            return first
        return sum_of(self._catalog.dims_T, first, Gradients(sections, flat[at:], None, squares_V[rows:]))

    def self_contained(self, packed: Packed, gradients: Gradients) -> Bytes:
        """A PUSH as a message that needs no other one to be read: with plain ids, sorted and float32 where it refers to
        a pull or has coded ids, else as it came."""
        if not packed.id_formats_S.any():
            return packed.buffer
        rows_S = np.diff(gradients.sections.starts_S1)
        row_format = values.RowFormat(value_codec("fp32"), moments=bool(gradients.squares_V.size))
        tables_S = gradients.sections.tables_S
        widths_T = row_format.widths(self._catalog)
        message = allocate(
            Kind.PUSH,
            generation=packed.generation,
            rank=packed.rank,
            step=packed.step,
            tables_S=tables_S,
            rows_S=rows_S,
            id_bytes_S=8 * rows_S,
            value_bytes_S=rows_S * widths_T[tables_S],
            value_formats_S=row_format.tag,
        )
        message.ids_area.view(np.int64)[:] = gradients.sections.ids_V
        message.values_area[:] = row_format.encode(
            gradients.values, rows_S, tables_S, self._catalog, squares_K=gradients.squares_V
        )
        return message.buffer

    def _references(self, packed: Packed, count: int, pulled: Pulled | None) -> Pulled:
        """The rows that the first `count` sections refer to."""
        if pulled is None or not pulled.sections:
            raise ProtocolError(
                f"worker {packed.rank} pushed step {packed.step} by reference to a pull that is not known here"
            )
        tables_S, rows_S, known = packed.tables_S[:count], packed.rows_S[:count], pulled.sections
        where_S = np.searchsorted(known.tables_S, tables_S)
        if not np.array_equal(known.tables_S[np.minimum(where_S, known.tables_S.size - 1)], tables_S):
            raise CorruptMessage(f"worker {packed.rank} refers to tables that its pull of step {packed.step} left out")
        area = packed.buffer[packed.ids_at_S1[0] : packed.ids_at_S1[count]]
        from shardkeep.compression.ids.codes import decode_subsets  # here: only jobs with coded ids load it

        places_K = decode_subsets(
            packed.id_formats_S[:count],
            rows_S,
            packed.id_bytes_S[:count],
            area,
            np.diff(known.starts_S1)[where_S],
            MOST_IDS,
        )
        at_K = places_K + np.repeat(known.starts_S1[where_S], rows_S)
        slots_K = pulled.slots_V[at_K]
        absent_S = np.bincount(np.repeat(np.arange(count), rows_S)[slots_K < 0], minlength=count)
        return Pulled(Sections(tables_S, _starts(rows_S), known.ids_V[at_K]), slots_K, absent_S)

    def _ids(self, packed: Packed, first: int) -> Sections:
        """The sections with ids, from `first` on."""
        tables_S, rows_S = packed.tables_S[first:], packed.rows_S[first:]
        formats_S, sizes_S = packed.id_formats_S[first:], packed.id_bytes_S[first:]
        area = packed.buffer[packed.ids_at_S1[first] : packed.ids_at_S1[-1]]
        if formats_S.any():
            from shardkeep.compression.ids.codes import decode_ids  # here: as above

            ids_V = decode_ids(formats_S, rows_S, sizes_S, area, MOST_IDS)
            return Sections(tables_S, _starts(rows_S), ids_V)
        wrong = sizes_S != 8 * rows_S
        if wrong.any():
            s = int(wrong.argmax())
            name = self._catalog.names[int(tables_S[s])]
            raise CorruptMessage(f"table {name}: {sizes_S[s]} bytes of ids for {rows_S[s]} rows")
        return self._sorted(Sections(tables_S, _starts(rows_S), plain(_int64(area), np.int64)))

    def _check_tables(self, packed: Packed, first: int, end: int) -> None:
        tables_S = packed.tables_S[first:end]
        if tables_S.size and int(tables_S.max()) >= len(self._catalog):
            raise ProtocolError(f"table {int(tables_S.max())} of {len(self._catalog)}")
        if (disorder_S := np.diff(tables_S) <= 0).any():
            s = int(disorder_S.argmax())
            raise CorruptMessage(
                f"{packed.kind.name}: table {tables_S[s + 1]} follows table {tables_S[s]}; "
                "tables rise and none stands twice"
            )

    def _sorted(self, sections: Sections) -> Sections:
        at = table_kernels.disorder(sections.starts_S1, sections.ids_V)
        if at >= 0:
            table = sections.tables_S[int(np.searchsorted(sections.starts_S1, at, side="right")) - 1]
            ids_V = sections.ids_V
            raise CorruptMessage(
                f"table {self._catalog.names[table]}: id {ids_V[at]} follows {ids_V[at - 1]}; ids must rise"
            )
        return sections


def refers(packed: Packed) -> bool:
    """Whether a message refers to an earlier pull."""
    return bool((packed.id_formats_S >= REFERENCE).any())


def _int64(area: Bytes) -> Ints:
    """The bytes as numbers; where sections by reference come first they may lie anywhere."""
    return area.view(np.int64) if area.ctypes.data % 8 == 0 else area.copy().view(np.int64)


def _starts(rows_S: Ints) -> Ints:
    starts_S1 = np.zeros(rows_S.size + 1, dtype=np.int64)
    np.cumsum(rows_S, out=starts_S1[1:])
    return starts_S1
