"""PushReader: decodes a packed push to gradients, and encodes it for the journal.

Validates the whole message before any part is used. Knows only the tables' specs: no rows, no gate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.base.contiguous import for_kernels
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.shard.tables import Gradients, Pulled, sum_of
from shardkeep.ps.wire.ids import num_references, read_ids, read_references
from shardkeep.ps.wire.message import Kind, Packed, allocate, lr_factor_of
from shardkeep.ps.wire.rows import PLAIN, RowFormat, decode


class PushReader:
    """Reads the pushes to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def gradients(self, packed: Packed, pulled: Pulled | None) -> Gradients:
        """The ids and gradients of a PUSH. The arrays may be views of the message.

        `pulled`: the result of the same rank's pull of the step. If the push has the same ids, its slots are reused. A
        push by reference has no other ids."""
        factor, gradients = lr_factor_of(packed), self._decoded(packed, pulled)
        return gradients if factor == 1.0 else replace(gradients, lr_factor=factor)

    def _decoded(self, packed: Packed, pulled: Pulled | None) -> Gradients:
        count = num_references(packed)
        referred = self._referred(packed, count, pulled) if count else None
        sections = read_ids(packed, self._catalog, count)
        flat, squares_V = decode(packed, self._catalog)
        flat = for_kernels(flat, np.float32)
        if referred is None:
            if pulled is not None and sections.same(pulled.sections):
                return Gradients(pulled.sections, flat, pulled, squares_V)
            return Gradients(sections, flat, None, squares_V)
        rows = referred.sections.ids_V.size
        at = int((packed.rows_S[:count] * self._catalog.dims_T[packed.tables_S[:count]]).sum())
        first = Gradients(referred.sections, flat[:at], referred, squares_V[:rows])
        if count == packed.tables_S.size:
            return first
        return sum_of(self._catalog.dims_T, first, Gradients(sections, flat[at:], None, squares_V[rows:]))

    def _referred(self, packed: Packed, count: int, pulled: Pulled | None) -> Pulled:
        """The rows that the first `count` sections refer to."""
        sections, at_K = read_references(packed, self._catalog, count, None if pulled is None else pulled.sections)
        assert pulled is not None
        slots_K = pulled.slots_V[at_K]
        section_K = np.repeat(np.arange(count), np.diff(sections.starts_S1))
        return Pulled(sections, slots_K, np.bincount(section_K[slots_K < 0], minlength=count))

    def self_contained(self, packed: Packed, gradients: Gradients) -> Bytes:
        """A PUSH that can be decoded without any other message.

        If it refers to a pull or has coded ids, encodes it again with plain sorted ids and float32; else unchanged."""
        if not packed.id_formats_S.any():
            return packed.buffer
        rows_S = np.diff(gradients.sections.starts_S1)
        row_format = RowFormat(PLAIN.codec, moments=bool(gradients.squares_V.size))
        tables_S = gradients.sections.tables_S
        widths_T = row_format.widths(self._catalog)
        message = allocate(
            Kind.PUSH,
            generation=packed.generation,
            rank=packed.rank,
            step=packed.step,
            value=packed.value,
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
