"""PushReader: decodes a packed push to gradients.

Validates the whole message before any part is used. Knows only the tables' specs: no rows, no gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardkeep.base.arrays import Bools
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.errors import ProtocolError
from shardkeep.compression.config import PushConfig
from shardkeep.compression.per_table import push_of
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import FoundSlots, Gradients
from shardkeep.ps.wire.ids import read_ids
from shardkeep.ps.wire.message import Packed, lr_factor_of
from shardkeep.ps.wire.rows import RowReader, moments_of


class PushReader:
    """Reads the pushes to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, rows: RowReader, tables: Sequence[TableSpec], push: PushConfig) -> None:
        """`push`: of the job."""
        self._rows, self._catalog = rows, rows.catalog
        self._frozen = frozenset(t for t, spec in enumerate(tables) if spec.freeze)
        self._moments_T: Bools = np.isin(rows.catalog.names, tables_with_moments(tables, push))

    def gradients(self, packed: Packed, pulled: Sequence[FoundSlots]) -> Gradients:
        """The ids and gradients of a PUSH. The arrays may be views of the message.

        `pulled`: the results of the pulls that it names. If the push has the ids of one, its slots are reused."""
        if self._frozen and (wrong := self._frozen.intersection(packed.tables_S.tolist())):
            raise ProtocolError(f"table {self._catalog.names[min(wrong)]}: is frozen, and a push has gradients of it")
        factor, gradients = lr_factor_of(packed), self._decoded(packed, pulled)
        return gradients if factor == 1.0 else replace(gradients, lr_factor=factor)

    def _decoded(self, packed: Packed, pulled: Sequence[FoundSlots]) -> Gradients:
        sections = read_ids(packed, self._catalog)
        wrong_S = (moments_of(packed) != self._moments_T[packed.tables_S]) & (packed.rows_S > 0)
        if wrong_S.any():
            name = self._catalog.names[packed.tables_S[wrong_S.argmax()]]
            raise ProtocolError(f"table {name}: a push differs from compression.push.second_moment of the job")
        flat = for_kernels(self._rows.decode(packed), np.float32)
        for one in pulled:
            if sections.same(one.sections):
                return Gradients(one.sections, flat, one)
        return Gradients(sections, flat)


def tables_with_moments(tables: Sequence[TableSpec], push: PushConfig) -> list[str]:
    """The names of the tables in whose pushes a row's second moment follows its gradient."""
    return [spec.name for spec in tables if push_of(spec.compression, push, frozen=bool(spec.freeze)).second_moment]
