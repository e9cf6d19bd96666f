"""Push messages: a step's encoded rows, one message per server, with ids, coded ids, or references to pulls.

Knows no transport and no codec.
"""
# V = requested ids, K = rows sent, T = tables

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.ps.client.compressor import EncodedRows
from shardkeep.ps.client.request import Request, find, together
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.placement import Split, split
from shardkeep.ps.placement_kernels import take_rows
from shardkeep.ps.wire.ids import EncodedIds, joined, places, write_ids, write_references
from shardkeep.ps.wire.message import Packed
from shardkeep.ps.wire.rows import ELEMENTS, PLAIN, encode_elements
from shardkeep.ps.wire.table_formats import TableFormats

Allocate = Callable[..., Packed]
"""`message.allocate` for a server, except the directory's columns."""


class PushWriter:
    """Writes the pushes of one worker.

    Args:
        formats: Formats of the encoded rows.
        coded: Refer to rows of the named pulls by position, and code the ids of all others.
        elements: Rows are float32; only their nonzero values are sent.
    """

    def __init__(
        self, catalog: Catalog, formats: TableFormats, *, num_servers: int, coded: bool, elements: bool
    ) -> None:
        self._catalog = catalog
        self._formats = formats
        self._widths_T = formats.widths_T
        self._num_servers = num_servers
        self.coded = coded
        """Whether ids are coded or refer to pulls."""
        self._elements = elements

    def write(self, rows: EncodedRows, request: Request, pulls: Sequence[Request], allocate: Allocate) -> list[Packed]:
        """Returns one message per server. `request`: the ids of the gradients; `pulls`: those that the named pulls
        requested."""
        servers = range(self._num_servers)
        parts = request.split if rows.positions_K is None else split(rows.ids, self._num_servers)
        if not self.coded:
            return [self._with_ids(rows, parts, server, allocate) for server in servers]
        places_K, pulled_ST = np.full(rows.ids.ids_V.size, -1, dtype=np.int64), np.zeros_like(parts.counts_ST)
        if (pulled := together(pulls, self._num_servers)) is not None:
            places_K, pulled_ST = _places(rows, request, pulled), pulled.split.counts_ST
        return [self._referring(rows, parts, server, places_K, pulled_ST[server], allocate) for server in servers]

    def _with_ids(self, rows: EncodedRows, parts: Split, server: int, allocate: Allocate) -> Packed:
        ids = write_ids(parts.counts_ST[server], parts.ids_of(server, rows.ids.ids_V), coded=False)

        def fill(out: Bytes) -> None:
            parts.take_rows(server, rows.ids.layout, rows.encoded, self._widths_T, out)

        return self._message(server, ids, fill, allocate)

    def _referring(
        self, rows: EncodedRows, parts: Split, server: int, places_K: Ints, pulled_T: Ints, allocate: Allocate
    ) -> Packed:
        layout, counts_T = rows.ids.layout, parts.counts_ST[server]
        mine = parts.positions(server)
        positions = np.arange(rows.ids.ids_V.size) if mine is None else mine
        known = places_K[positions] >= 0
        known_T = np.bincount(np.repeat(np.arange(counts_T.size), counts_T)[known], minlength=counts_T.size)
        known_K, other_K = positions[known], positions[~known]
        references = write_references(known_T, places_K[known_K], pulled_T)
        others = write_ids(counts_T - known_T, rows.ids.ids_V[other_K], coded=True)
        at = int((references.rows_S * self._widths_T[references.tables_S]).sum())

        def fill(out: Bytes) -> None:
            take_rows(rows.encoded, known_K, known_T, layout.starts_T1, self._widths_T, out[:at])
            take_rows(rows.encoded, other_K, counts_T - known_T, layout.starts_T1, self._widths_T, out[at:])

        return self._message(server, joined(references, others), fill, allocate)

    def _message(self, server: int, ids: EncodedIds, fill: Callable[[Bytes], None], allocate: Allocate) -> Packed:
        """A message with these ids, and the rows that `fill` writes in their order."""
        widths_S = self._widths_T[ids.tables_S]
        if self._elements:
            rows = np.empty(int((ids.rows_S * widths_S).sum()), dtype=np.uint8)
            fill(rows)
            packets = encode_elements(rows.view(np.float32), ids.rows_S, ids.tables_S, self._catalog, PLAIN.codec)
            sizes_S = np.array([packet.size for packet in packets], dtype=np.int64)
            message = allocate(server, **ids.directory, value_bytes_S=sizes_S, value_formats_S=ELEMENTS)
            message.values_area[:] = np.concatenate(packets) if packets else 0
        else:
            tags_S = self._formats.tags_T[ids.tables_S]
            message = allocate(server, **ids.directory, value_bytes_S=ids.rows_S * widths_S, value_formats_S=tags_S)
            fill(message.values_area)
        message.ids_area[:] = ids.area
        return message


def _places(rows: EncodedRows, request: Request, pulled: Request) -> Ints:
    """The position of each row to send among its table's rows that its server was sent a pull for, -1 = none."""
    places_V = places(pulled.split, pulled.ids.ids_V.size)
    if request is not pulled:
        places_V = _or_none(places_V, find(request.ids, pulled.ids))
    return places_V if rows.positions_K is None else _or_none(places_V, rows.positions_K)


def _or_none(places_V: Ints, at_K: Ints) -> Ints:
    """The places at some positions; -1 where the position is -1."""
    return np.where(at_K < 0, -1, places_V[at_K]) if places_V.size else np.full(at_K.size, -1, dtype=np.int64)
