"""Answers: from the ids of a pull to the message with their rows.

Where ids are coded, rows that are not there yet are only named: the worker computes their initial values itself.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import numpy as np

from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codec import value_codec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.shard.tables import Pulled, Sections, Tables
from shardkeep.ps.wire.message import Bytes, Kind, Packed, allocate
from shardkeep.ps.wire.rows import PLAIN, RowFormat


class Answers:
    """Makes one server's answers."""

    def __init__(self, tables: Tables, catalog: Catalog, compression: CompressionConfig) -> None:
        self._tables = tables
        self._catalog = catalog
        self._format = RowFormat(value_codec(compression.pull.values, compression.pull.scale))
        self._names_absent = compression.ids == "coded"

    def rows(self, message: Packed, wanted: Sections, *, staleness: int) -> tuple[Bytes, Pulled]:
        """The rows of a PULL or READ, and what was found of them."""
        rows_S, reads = np.diff(wanted.starts_S1), message.kind is Kind.READ
        row_format = PLAIN if reads else self._format  # evaluation reads the rows as they are
        if row_format.plain and (reads or not self._names_absent):
            answer = self._allocate(message, wanted, rows_S, row_format, staleness)
            return answer.buffer, self._tables.pull(wanted, answer.values_area.view(np.float32))
        dims_S = self._catalog.dims_T[wanted.tables_S]
        flat = np.empty(int((rows_S * dims_S).sum()), dtype=np.float32)
        pulled = self._tables.pull(wanted, flat)
        if reads or not self._names_absent:
            answer = self._allocate(message, wanted, rows_S, row_format, staleness)
        else:
            from shardkeep.compression.ids.codes import encode_subsets  # here: only jobs with coded ids load it

            there_V, there_S = pulled.slots_V >= 0, rows_S - pulled.absent_S
            starts_S1 = np.concatenate([[0], np.cumsum(there_S)])
            places_V = np.arange(there_V.size) - np.repeat(wanted.starts_S1[:-1], rows_S)
            names = encode_subsets(starts_S1, places_V[there_V], rows_S)
            if pulled.absent_S.any():
                flat = flat[np.repeat(there_V, np.repeat(dims_S, rows_S))]
            rows_S = there_S
            answer = self._allocate(
                message, wanted, rows_S, row_format, staleness, id_formats_S=names.formats_S, id_bytes_S=names.sizes_S
            )
            answer.ids_area[:] = names.area
        answer.values_area[:] = row_format.encode(flat, rows_S, wanted.tables_S, self._catalog)
        return answer.buffer, pulled

    def _allocate(
        self,
        message: Packed,
        wanted: Sections,
        rows_S: np.ndarray[tuple[int], np.dtype[np.int64]],
        row_format: RowFormat,
        staleness: int,
        **names: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> Packed:
        return allocate(
            Kind.ROWS,
            generation=message.generation,
            rank=message.rank,
            step=message.step,
            value=staleness,
            tables_S=wanted.tables_S,
            rows_S=rows_S,
            value_bytes_S=rows_S * row_format.widths(self._catalog)[wanted.tables_S],
            value_formats_S=row_format.tag,
            **names,
        )
