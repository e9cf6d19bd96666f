"""PushReader: decodes a packed push to gradients, and encodes it for the journal.

Validates the whole message before any part is used. Knows only the tables' specs: no rows, no gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardkeep.base.arrays import Bools, Bytes, Ints
from shardkeep.base.contiguous import for_kernels
from shardkeep.base.errors import ProtocolError
from shardkeep.compression.config import PushConfig
from shardkeep.compression.per_table import push_of
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, FoundSlots, Gradients, SectionIds, union
from shardkeep.ps.server.tables import sum_of
from shardkeep.ps.wire.ids import num_references, read_ids, read_references
from shardkeep.ps.wire.message import Kind, Packed, allocate, lr_factor_of
from shardkeep.ps.wire.rows import RowFormats, decode, format_of, moments_of


class PushReader:
    """Reads the pushes to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, catalog: Catalog, tables: Sequence[TableSpec], push: PushConfig) -> None:
        """`push`: of the job."""
        self._catalog = catalog
        self._frozen = frozenset(t for t, spec in enumerate(tables) if spec.freeze)
        self._moments_T: Bools = np.isin(catalog.names, tables_with_moments(tables, push))
        self._widths_T: Ints = catalog.dims_T + self._moments_T
        self._plain = RowFormats(catalog, [format_of("fp32", moments=moments) for moments in self._moments_T.tolist()])

    def gradients(self, packed: Packed, pulled: Sequence[FoundSlots]) -> Gradients:
        """The ids and gradients of a PUSH. The arrays may be views of the message.

        `pulled`: the results of the pulls that it names. If the push has the ids of one, its slots are reused. Sections
        by reference refer to the ids of all of them together."""
        if self._frozen and (wrong := self._frozen.intersection(packed.tables_S.tolist())):
            raise ProtocolError(f"table {self._catalog.names[min(wrong)]}: is frozen, and a push has gradients of it")
        factor, gradients = lr_factor_of(packed), self._decoded(packed, pulled)
        return gradients if factor == 1.0 else replace(gradients, lr_factor=factor)

    def _decoded(self, packed: Packed, pulled: Sequence[FoundSlots]) -> Gradients:
        count = num_references(packed)
        referred = self._referred(packed, count, _together(pulled)) if count else None
        sections = read_ids(packed, self._catalog, count)
        wrong_S = (moments_of(packed) != self._moments_T[packed.tables_S]) & (packed.rows_S > 0)
        if wrong_S.any():
            name = self._catalog.names[packed.tables_S[wrong_S.argmax()]]
            raise ProtocolError(f"table {name}: a push differs from compression.push.second_moment of the job")
        flat = for_kernels(decode(packed, self._catalog), np.float32)
        if referred is None:
            for one in pulled:
                if sections.same(one.sections):
                    return Gradients(one.sections, flat, one)
            return Gradients(sections, flat)
        at = int((packed.rows_S[:count] * self._widths_T[packed.tables_S[:count]]).sum())
        first = Gradients(referred.sections, flat[:at], referred)
        if count == packed.tables_S.size:
            return first
        return sum_of(self._widths_T, [first, Gradients(sections, flat[at:])])

    def _referred(self, packed: Packed, count: int, pulled: FoundSlots | None) -> FoundSlots:
        """The rows that the first `count` sections refer to."""
        sections, at_K = read_references(packed, self._catalog, count, None if pulled is None else pulled.sections)
        assert pulled is not None
        slots_K = pulled.slots_V[at_K]
        section_K = np.repeat(np.arange(count), np.diff(sections.starts_S1))
        return FoundSlots(sections, slots_K, np.bincount(section_K[slots_K < 0], minlength=count))

    def self_contained(self, packed: Packed, gradients: Gradients) -> Bytes:
        """A PUSH that can be decoded without any other message.

        If it refers to a pull or has coded ids, encodes it again with plain sorted ids and float32; else unchanged."""
        if not packed.id_formats_S.any():
            return packed.buffer
        starts_S1, tables_S = gradients.sections.starts_S1, gradients.sections.tables_S
        rows_S = np.diff(starts_S1)
        message = allocate(
            Kind.PUSH,
            generation=packed.generation,
            rank=packed.rank,
            step=packed.step,
            value=packed.value,
            tables_S=tables_S,
            rows_S=rows_S,
            id_bytes_S=8 * rows_S,
            value_bytes_S=rows_S * self._plain.widths_T[tables_S],
            value_formats_S=self._plain.tags_T[tables_S],
        )
        message.ids_area.view(np.int64)[:] = gradients.sections.ids_V
        message.values_area[:] = self._plain.encode(gradients.values, rows_S, tables_S)
        return message.buffer


def tables_with_moments(tables: Sequence[TableSpec], push: PushConfig) -> list[str]:
    """The names of the tables in whose pushes a row's second moment follows its gradient."""
    return [spec.name for spec in tables if push_of(spec.compression, push, frozen=bool(spec.freeze)).second_moment]


def _together(pulled: Sequence[FoundSlots]) -> FoundSlots | None:
    """Several pulls as one of all their ids; None = there are none."""
    if len(pulled) < 2:
        return pulled[0] if pulled else None
    tables_U, ids_U, at_U = union([one.sections for one in pulled])
    tables_S, starts_S = np.unique(tables_U, return_index=True)
    slots_U = np.concatenate([one.slots_V for one in pulled])[at_U]
    sections = SectionIds(tables_S, np.append(starts_S, ids_U.size), ids_U)
    return FoundSlots(sections, slots_U, np.add.reduceat((slots_U < 0).astype(np.int64), starts_S))
