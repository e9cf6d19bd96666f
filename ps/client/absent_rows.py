"""Rows that no server has: the worker computes their initial values, so that servers need not send them."""
# S = sections, V = requested ids, D = embedding dim

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.shard.table.initializers import Initial
from shardkeep.ps.wire.ids import read_present
from shardkeep.ps.wire.message import Packed


class AbsentRows:
    """Adds initial rows to replies in which servers only name the rows that they lack.

    Args:
        seed: Seed of the job, for initial values.
    """

    def __init__(self, tables: Sequence[TableSpec], catalog: Catalog, *, seed: int) -> None:
        self._initials = [Initial(spec.init, seed=seed, name=spec.name) for spec in tables]
        self._catalog = catalog

    def filled_in(self, reply: Packed, flat: Floats, ids_V: Ints, rows_S: Ints) -> Floats:
        """Returns all requested rows, flat: those of the reply (`flat`) and the absent ones. Returns `flat` itself if
        none is absent. Raises CorruptMessage."""
        there_V = read_present(reply, rows_S)
        if there_V is None:
            return flat
        starts_S = np.cumsum(rows_S) - rows_S
        dims_V = np.repeat(self._catalog.dims_T[reply.tables_S], rows_S)
        full = np.empty(int(dims_V.sum()), dtype=np.float32)
        full[np.repeat(there_V, dims_V)] = flat
        values_S = np.concatenate([[0], np.cumsum(rows_S * self._catalog.dims_T[reply.tables_S])])
        for s in np.flatnonzero(reply.rows_S < rows_S).tolist():
            section = slice(int(starts_S[s]), int(starts_S[s] + rows_S[s]))
            rows_UD = full[values_S[s] : values_S[s + 1]].reshape(int(rows_S[s]), -1)
            absent = np.flatnonzero(~there_V[section])
            rows_UD[absent] = self._initials[int(reply.tables_S[s])].rows(ids_V[section][absent], rows_UD.shape[1])
        return full
