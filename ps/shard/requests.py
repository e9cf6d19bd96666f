"""From a packed request to sections and gradients. A message is wholly valid before any of it is used.

Knows the tables' specs only: no rows, no gate.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.ps import values
from shardkeep.ps.message import Packed
from shardkeep.ps.shard import table_kernels
from shardkeep.ps.shard.table import plain
from shardkeep.ps.shard.tables import Gradients, Pulled, Sections
from shardkeep.ps.slab import Catalog

Ints = npt.NDArray[np.int64]


class Decoder:
    """Decodes requests to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def wanted(self, packed: Packed) -> Sections:
        """The ids of a PULL or READ."""
        if packed.value_bytes_S.any():
            raise CorruptMessage(f"{packed.kind.name} with {int(packed.value_bytes_S.sum())} bytes of values")
        return self._sorted(self._sections(packed))

    def gradients(self, packed: Packed, pulled: Pulled | None) -> Gradients:
        """The ids and gradients of a PUSH; the arrays may be views of the message.

        `pulled`: what the same rank's pull of the step found: a push of the same ids needs no check and no second
        search."""
        sections = self._sections(packed)
        flat = plain(values.decode(packed, self._catalog), np.float32)
        if pulled is not None and sections.same(pulled.sections):
            return Gradients(pulled.sections, flat, pulled)
        return Gradients(self._sorted(sections), flat)

    def _sections(self, packed: Packed) -> Sections:
        self._check_tables(packed)
        wrong = (packed.id_bytes_S != 8 * packed.rows_S) | (packed.id_formats_S != 0)
        if wrong.any():
            self._refuse(packed, int(wrong.argmax()))
        starts_S1 = np.zeros(packed.rows_S.size + 1, dtype=np.int64)
        np.cumsum(packed.rows_S, out=starts_S1[1:])
        return Sections(packed.tables_S, starts_S1, plain(packed.ids_area.view(np.int64), np.int64))

    def _check_tables(self, packed: Packed) -> None:
        tables_S = packed.tables_S
        if tables_S.size and int(tables_S.max()) >= len(self._catalog):
            raise ProtocolError(f"table {int(tables_S.max())} of {len(self._catalog)}")
        if (disorder_S := np.diff(tables_S) <= 0).any():
            s = int(disorder_S.argmax())
            raise CorruptMessage(
                f"{packed.kind.name}: table {tables_S[s + 1]} follows table {tables_S[s]}; "
                "tables rise and none stands twice"
            )

    def _refuse(self, packed: Packed, s: int) -> None:
        section = packed.section(s)
        name = self._catalog.names[section.table]
        if section.id_format != 0:
            raise CorruptMessage(f"table {name}: unknown id format {section.id_format}; allowed: 0")
        raise CorruptMessage(f"table {name}: {section.ids.size} bytes of ids for {section.rows} rows")

    def _sorted(self, sections: Sections) -> Sections:
        at = table_kernels.disorder(sections.starts_S1, sections.ids_V)
        if at >= 0:
            table = sections.tables_S[int(np.searchsorted(sections.starts_S1, at, side="right")) - 1]
            ids_V = sections.ids_V
            raise CorruptMessage(
                f"table {self._catalog.names[table]}: id {ids_V[at]} follows {ids_V[at - 1]}; ids must rise"
            )
        return sections
