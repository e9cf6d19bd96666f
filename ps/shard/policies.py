"""Policies: admission and eviction of all tables of a server, around the updates of their rows.

Lives with `Tables`, which calls it only where a table has a policy. Takes no lock but those that it is given.
"""
# S = sections, T = tables, V = ids of all sections

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.ps.jagged import SectionIds
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.admission import Admission
from shardkeep.ps.shard.table.eviction import Eviction
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.table import Table

Locked = Callable[..., AbstractContextManager[None]]
"""Holds the locks of some tables while their rows change."""
MakeRoom = Callable[[int, int], None]
"""Makes room for so many pre-images of a table's rows, if a snapshot is being taken."""


class Policies:
    """The policies of a server's tables."""

    def __init__(
        self, tables: Sequence[Table], dims_T: Ints, images_TC: Ints, locked: Locked, make_room: MakeRoom
    ) -> None:
        """`images_TC`: what pushes keep of each table for a snapshot."""
        self._tables, self._dims_T, self._images = tables, dims_T, images_TC
        self._locked, self._make_room = locked, make_room
        self._evictions = {t: Eviction(one, one.spec.evict) for t, one in enumerate(tables) if one.spec.evict}
        counting = {table.counts_for: t for t, table in enumerate(tables) if table.counts_for}
        self._counting = {t: counting.get(table.spec.name) for t, table in enumerate(tables) if table.spec.admit}
        self._admissions = {
            t: Admission(table, table.spec.admit, None if (c := self._counting[t]) is None else self._evictions[c])
            for t, table in enumerate(tables)
            if table.spec.admit
        }
        self._swept = -1

    def admit(
        self, sections: SectionIds, slots_V: Ints, pushes_V: Floats, update: Update, *, found: bool
    ) -> Bools | None:
        """Which rows of a push are applied; None = all. Sets the slots of the tables with admission.

        `found`: `slots_V` has the slots of an earlier pull."""
        kept_V: Bools | None = None
        for s, t in enumerate(sections.tables_S.tolist()):
            if t not in self._admissions:
                continue
            part = slice(int(sections.starts_S1[s]), int(sections.starts_S1[s + 1]))
            pushes_U = pushes_V[part] if pushes_V.size else pushes_V
            kept_U = self._admit(t, sections.ids_V[part], slots_V[part], pushes_U, update, found)
            if kept_U is not None:
                kept_V = np.ones(sections.ids_V.size, dtype=np.bool_) if kept_V is None else kept_V
                kept_V[part] = kept_U
        return kept_V

    def _admit(self, t: int, ids_U: Ints, slots_U: Ints, pushes_U: Floats, update: Update, found: bool) -> Bools | None:
        counting = self._counting[t]
        with self._locked(t) if counting is None else self._locked(t, counting):
            at.find_rows(self._tables[t].descriptor, ids_U, slots_U, found)
            if counting is not None:
                self._make_room(counting, 3 * ids_U.size)
            images = self._images[t if counting is None else counting]
            return self._admissions[t].admit(ids_U, slots_U, pushes_U, update, images)

    def begin(self, sections: SectionIds, part: slice, slots_V: Ints, *, found: bool) -> list[int]:
        """Prepares an update of some sections: remembered slots whose row has gone become -1. Returns the first slot of
        new rows in each section. The caller holds the tables' locks."""
        first_S = []
        for s in range(part.start, part.stop):
            table = self._tables[int(sections.tables_S[s])]
            first_S.append(table.num_rows)
            if found and table.spec.evict is not None:
                where = slice(int(sections.starts_S1[s]), int(sections.starts_S1[s + 1]))
                at.forget_moved(table.descriptor, sections.ids_V[where], slots_V[where])
        return first_S

    def pushed(
        self,
        sections: SectionIds,
        part: slice,
        slots_V: Ints,
        pushes_V: Floats,
        first_S: Sequence[int],
        update: Update,
    ) -> None:
        """Counts the update of some sections. `first_S`: what `begin` gave. The caller holds the tables' locks."""
        for s, first_new in zip(range(part.start, part.stop), first_S, strict=True):
            eviction = self._evictions.get(int(sections.tables_S[s]))
            if eviction is not None:
                where = slice(int(sections.starts_S1[s]), int(sections.starts_S1[s + 1]))
                pushes_U = pushes_V[where] if pushes_V.size else pushes_V
                eviction.pushed(slots_V[where], pushes_U, first_new, update)

    def sweep(self, update: Update) -> None:
        """Removes the rows that go after the updates of a step."""
        step = update.step + update.earlier_steps
        if step <= self._swept:
            return
        self._swept = step
        for t, eviction in self._evictions.items():
            with self._locked(t):
                for slots_U in eviction.sweep(update):
                    if slots_U.size:
                        self._make_room(t, 2 * slots_U.size)
                        eviction.remove(self._images[t], slots_U)

    def pushes_of(self, sections: SectionIds, pushes: Sequence[SectionIds]) -> Floats:
        """How many of the pushes have each id of their sum."""
        pushes_V = np.zeros(sections.ids_V.size, dtype=np.float32)
        of_sum = sections.tables_S, sections.starts_S1, sections.ids_V
        for push in pushes:
            at.count_pushes(*of_sum, push.tables_S, push.starts_S1, push.ids_V, pushes_V)
        return pushes_V

    def only(
        self, sections: SectionIds, kept_V: Bools, values: Floats, slots_V: Ints
    ) -> tuple[SectionIds, Floats, Ints]:
        """The sections, values and slots of the rows that are kept."""
        ids_V, slots_V, out = sections.ids_V.copy(), slots_V.copy(), np.empty_like(values)
        starts_S1, dims_S = np.empty_like(sections.starts_S1), self._dims_T[sections.tables_S]
        size = at.compact(sections.starts_S1, dims_S, kept_V, ids_V, values, slots_V, starts_S1, out)
        count = int(starts_S1[-1])
        return SectionIds(sections.tables_S, starts_S1, ids_V[:count]), out[:size], slots_V[:count]
