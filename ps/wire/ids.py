"""The ids of a message's sections as a worker writes them: raw, coded, or as a reference to the ids that it pulled.

A push may have two sections of a table: first come those by reference, table after table, then those with ids. What a
server makes of them stands in ps/shard/requests.py.
"""
# S = sections, V = ids asked for, K = ids sent, T = tables

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.ps.placement import Split
from shardkeep.ps.wire.message import Bytes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WrittenIds:
    """Columns of the directory, the bytes of all sections' ids, and which of the ids each row of the message is."""

    tables_S: Ints
    rows_S: Ints
    id_formats_S: Ints
    id_bytes_S: Ints
    area: Bytes

    @property
    def directory(self) -> dict[str, Any]:
        """As `allocate` takes them."""
        return {
            "tables_S": self.tables_S,
            "rows_S": self.rows_S,
            "id_formats_S": self.id_formats_S,
            "id_bytes_S": self.id_bytes_S,
        }


def write_ids(counts_T: Ints, ids_K: Ints, *, coded: bool) -> WrittenIds:
    """Ids of some tables, table after table; `counts_T`: how many each table has."""
    tables_S = np.flatnonzero(counts_T)
    rows_S = counts_T[tables_S]
    if not coded:
        return WrittenIds(tables_S, rows_S, np.zeros_like(rows_S), 8 * rows_S, ids_K.view(np.uint8))
    from shardkeep.compression.ids.codes import encode_ids  # here: only jobs with coded ids load their kernels

    found = encode_ids(_starts(rows_S), ids_K)
    return WrittenIds(tables_S, rows_S, found.formats_S, found.sizes_S, found.area)


def write_references(counts_T: Ints, places_K: Ints, pulled_T: Ints) -> WrittenIds:
    """Rows by their places among those of their table that the same step pulled from the server, `pulled_T` many."""
    from shardkeep.compression.ids.codes import encode_subsets  # here: as above

    tables_S = np.flatnonzero(counts_T)
    rows_S = counts_T[tables_S]
    found = encode_subsets(_starts(rows_S), places_K, pulled_T[tables_S])
    return WrittenIds(tables_S, rows_S, found.formats_S, found.sizes_S, found.area)


def joined(first: WrittenIds, second: WrittenIds) -> WrittenIds:
    """The sections of both, one after the other."""
    return WrittenIds(
        np.concatenate([first.tables_S, second.tables_S]),
        np.concatenate([first.rows_S, second.rows_S]),
        np.concatenate([first.id_formats_S, second.id_formats_S]),
        np.concatenate([first.id_bytes_S, second.id_bytes_S]),
        np.concatenate([first.area, second.area]),
    )


def places(split: Split, num_ids: int) -> Ints:
    """Where each id of a split stands among those of its table and server, int64 (V,)."""
    places_V = np.empty(num_ids, dtype=np.int64)
    for server, counts_T in enumerate(split.counts_ST):
        within = np.arange(split.count(server)) - np.repeat(_starts(counts_T)[:-1], counts_T)
        positions = split.positions(server)
        places_V[slice(None) if positions is None else positions] = within
    return places_V


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
