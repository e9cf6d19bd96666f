"""TableFormats: how the rows of each table are written, where tables have formats of their own.

Reads like one RowFormat. With one format for all tables it is that format; else each run of tables of one format is
coded on its own.
"""
# T = tables of the job, S = sections, K = rows, D = embedding dim

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints, UInt64s
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.wire.rows import RowFormat, joined, joined_squares


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive sections of one format: their sections, rows, and places in values and bytes."""

    row_format: RowFormat
    stochastic: bool
    sections: slice
    rows: slice
    values: slice
    encoded: slice


class TableFormats:
    """The format of each table.

    Args:
        formats_T: Of each table.
        stochastic_T: Whether a table's values are rounded at random; None = all, where there are keys.
    """

    def __init__(
        self, catalog: Catalog, formats_T: Sequence[RowFormat], stochastic_T: Sequence[bool] | None = None
    ) -> None:
        both_T = list(zip(formats_T, stochastic_T or [True] * len(formats_T), strict=True))
        kinds = list(dict.fromkeys(both_T))
        self._kinds = kinds
        self._kind_T: Ints = np.array([kinds.index(both) for both in both_T], dtype=np.int64)
        self.one = kinds[0][0] if len(kinds) == 1 else None
        """The format of every table; None where they differ."""
        dims_T = catalog.dims_T.tolist()
        self.widths_T: Ints = np.array([f.row_bytes(d) for f, d in zip(formats_T, dims_T, strict=True)], dtype=np.int64)
        """Bytes of one row of each table."""
        self.tags_T: Ints = np.array([row_format.tag for row_format in formats_T], dtype=np.int64)
        """Number on the wire of each table's format."""

    @property
    def plain(self) -> bool:
        """Whether the bytes are the float32 rows themselves."""
        return all(row_format.plain for row_format, _ in self._kinds)

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
        """As `RowFormat.encode`."""
        if self.one is not None:
            return self.one.encode(flat, rows_S, tables_S, catalog, squares_K=squares_K, keys_K=keys_K)
        parts = [
            run.row_format.encode(
                flat[run.values],
                rows_S[run.sections],
                tables[run.sections],
                catalog,
                squares_K=None if squares_K is None else squares_K[run.rows],
                keys_K=keys_K[run.rows] if keys_K is not None and run.stochastic else None,
            )
            for tables in (_tables(tables_S, catalog),)
            for run in self._runs(rows_S, tables, catalog)
        ]
        return joined(parts, np.uint8)

    def decode(self, encoded: Bytes, rows_S: Ints, tables_S: Ints | None, catalog: Catalog) -> tuple[Floats, Floats]:
        """As `RowFormat.decode`; the second moment of a row that came without one is NaN."""
        if self.one is not None:
            return self.one.decode(encoded, rows_S, tables_S, catalog)
        tables = _tables(tables_S, catalog)
        parts = [
            (run.row_format.decode(encoded[run.encoded], rows_S[run.sections], tables[run.sections], catalog), run.rows)
            for run in self._runs(rows_S, tables, catalog)
        ]
        flat = joined([rows for (rows, _), _ in parts], np.float32)
        return flat, joined_squares([(squares, rows.stop - rows.start) for (_, squares), rows in parts])

    def saturated_values(self, encoded: Bytes, rows_S: Ints, catalog: Catalog) -> int:
        """As `RowFormat.saturated_values`."""
        if self.one is not None:
            return self.one.saturated_values(encoded, rows_S, catalog)
        tables = _tables(None, catalog)
        return sum(
            run.row_format.saturated_values(encoded[run.encoded], rows_S[run.sections], catalog, tables[run.sections])
            for run in self._runs(rows_S, tables, catalog)
        )

    def _runs(self, rows_S: Ints, tables_S: Ints, catalog: Catalog) -> Iterator[_Run]:
        kinds_S = self._kind_T[tables_S]
        bounds = [0, *(np.flatnonzero(np.diff(kinds_S)) + 1).tolist(), kinds_S.size] if kinds_S.size else []
        rows_S1, values_S1, bytes_S1 = (
            np.concatenate([[0], np.cumsum(sizes_S)])
            for sizes_S in (rows_S, rows_S * catalog.dims_T[tables_S], rows_S * self.widths_T[tables_S])
        )
        for first, end in itertools.pairwise(bounds):
            row_format, stochastic = self._kinds[int(kinds_S[first])]
            rows, values, encoded = (slice(int(at[first]), int(at[end])) for at in (rows_S1, values_S1, bytes_S1))
            yield _Run(row_format, stochastic, slice(first, end), rows, values, encoded)


def _tables(tables_S: Ints | None, catalog: Catalog) -> Ints:
    return np.arange(len(catalog)) if tables_S is None else tables_S
