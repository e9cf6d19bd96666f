"""Policies: admission and eviction of all tables of a server, around the updates of their rows.

Lives with `Tables`, which calls it only where a table has a policy. Takes no lock but those that it is given.
"""
# S = sections, T = tables, V = ids of all sections

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.ps.jagged import SectionIds
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.admission import Admission
from shardkeep.ps.shard.table.eviction import Eviction
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.table import NO_COUNTS, Table

Locked = Callable[..., AbstractContextManager[None]]
"""Holds the locks of some tables while their rows change."""
MakeRoom = Callable[[int, int], None]
"""Makes room for so many pre-images of a table's rows, if a snapshot is being taken."""


class Policies:
    """The policies of a server's tables."""

    def __init__(
        self,
        tables: Sequence[Table],
        descriptors: Ints,
        dims_T: Ints,
        images_TC: Ints,
        locked: Locked,
        make_room: MakeRoom,
    ) -> None:
        """`images_TC`: what pushes keep of each table for a snapshot."""
        self._tables, self._descriptors, self._dims_T, self._images = tables, descriptors, dims_T, images_TC
        self._locked, self._make_room = locked, make_room
        self._evictions = {t: Eviction(one, one.spec.evict) for t, one in enumerate(tables) if one.spec.evict}
        counts = {table.counts_for: t for t, table in enumerate(tables) if table.counts_for}
        self._counting = {t: counts[table.spec.name] for t, table in enumerate(tables) if table.spec.name in counts}
        self._admits_T: Bools = np.array([table.spec.admit is not None for table in tables], dtype=np.bool_)
        self._admissions = {
            t: Admission(
                table, table.spec.admit, self._evictions.get(c := self._counting.get(t, -1)), partial(self._drop, c)
            )
            for t, table in enumerate(tables)
            if table.spec.admit
        }
        self._swept = -1
        self._rules_T = np.zeros((len(tables), at.RULES), dtype=np.float64)
        self._clocks_T: Ints = np.zeros(len(tables), dtype=np.int64)
        for t, eviction in self._evictions.items():
            self._rules_T[t] = eviction.rules
        self._evicting_E: Ints = np.array(list(self._evictions), dtype=np.int64)
        shape = len(self._evictions), BUCKETS if self._rules_T[:, at.CAPACITY].any() else 0
        self._counts_EB, self._over_EB = np.zeros(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        self._counted_E, self._num_over_E, self._ends_E = np.zeros((3, len(self._evictions)), dtype=np.int64)
        self._slots: Ints = np.empty(1024, dtype=np.int64)

    def admit(
        self, sections: SectionIds, slots_V: Ints, pushes_V: Floats, update: Update, *, found: bool
    ) -> Bools | None:
        """Which rows of a push are applied; None = all. Sets the slots of the tables with admission.

        `found`: `slots_V` has the slots of an earlier pull."""
        if not self._admissions:
            return None
        kept_V: Bools | None = None
        absent_S = np.empty(sections.tables_S.size, dtype=np.int64)
        with self._locked(*self._admissions, *self._counting.values()):
            of_push = sections.tables_S, sections.starts_S1, sections.ids_V, slots_V
            at.find_absent(self._descriptors, *of_push, found, self._admits_T, absent_S)
            for s in np.flatnonzero(absent_S).tolist():
                part = slice(int(sections.starts_S1[s]), int(sections.starts_S1[s + 1]))
                pushes_U = pushes_V[part] if pushes_V.size else pushes_V
                kept_U = self._admit(int(sections.tables_S[s]), sections.ids_V[part], slots_V[part], pushes_U, update)
                if kept_U is not None:
                    kept_V = np.ones(sections.ids_V.size, dtype=np.bool_) if kept_V is None else kept_V
                    kept_V[part] = kept_U
        return kept_V

    def _admit(self, t: int, ids_U: Ints, slots_U: Ints, pushes_U: Floats, update: Update) -> Bools | None:
        counting = self._counting.get(t, t)
        if counting != t:
            self._make_room(counting, 3 * ids_U.size)
        return self._admissions[t].admit(ids_U, slots_U, pushes_U, update, self._images[counting])

    def begin(self, sections: SectionIds, part: slice, slots_V: Ints, *, found: bool) -> Ints:
        """Prepares an update of some sections: remembered slots whose row has gone become -1. Returns the first slot of
        new rows in each section. The caller holds the tables' locks."""
        first_S = np.empty(part.stop - part.start, dtype=np.int64)
        starts_S1 = sections.starts_S1[part.start : part.stop + 1]
        tables_S = sections.tables_S[part]
        at.begin(self._descriptors, tables_S, starts_S1, sections.ids_V, slots_V, found, first_S)
        return first_S

    def pushed(
        self, sections: SectionIds, part: slice, slots_V: Ints, pushes_V: Floats, first_S: Ints, update: Update
    ) -> None:
        """Counts the update of some sections. `first_S`: what `begin` gave. The caller holds the tables' locks."""
        self._set_clocks(update)
        starts_S1, tables_S = sections.starts_S1[part.start : part.stop + 1], sections.tables_S[part]
        at.pushed(
            self._descriptors, tables_S, starts_S1, slots_V, pushes_V, first_S, self._clocks_T, self._rules_T
        )  # fmt: skip

    def _set_clocks(self, update: Update) -> None:
        for t, eviction in self._evictions.items():
            self._clocks_T[t] = eviction.clock(update)

    def sweep(self, update: Update) -> None:
        """Removes the rows that go after the updates of a step."""
        step = update.step + update.earlier_steps
        if step <= self._swept or not self._evictions:
            return
        self._swept = step
        self._set_clocks(update)
        with self._locked(*self._evictions):
            self._remove_expired(update)
            for e in np.flatnonzero(self._num_over_E).tolist():
                over_B, self._num_over_E[e] = self._over_EB[e, : self._num_over_E[e]], 0
                t = int(self._evicting_E[e])
                self._remove(e, self._evictions[t].lowest(over_B, self._counts_EB[e], update))

    def _remove_expired(self, update: Update) -> None:
        """Removes what is too old or scores too low. Counts the new rows of each bucket first."""
        ranges_E2 = np.array([each.hashes(update) for each in self._evictions.values()], dtype=np.uint64)
        state = self._counts_EB, self._counted_E, self._over_EB, self._num_over_E, self._ends_E
        place = self._descriptors, self._evicting_E, ranges_E2, self._clocks_T, self._rules_T
        while (count := at.sweep(*place, *state, self._slots)) > self._slots.size:
            self._slots = np.empty(2 * count, dtype=np.int64)
        begin = 0
        for e, end in enumerate(self._ends_E.tolist() if count else ()):
            if begin < end:
                self._remove(e, self._evictions[int(self._evicting_E[e])].expired(self._slots[begin:end]))
            begin = end

    def _drop(self, t: int, slots_U: Ints) -> None:
        """Removes rows of a table whose rows go for another reason. A snapshot has room for two pre-images of each."""
        e = list(self._evictions).index(t)
        counts_B = self._counts_EB[e] if self._evictions[t].capacity else NO_COUNTS
        if counts_B.size:
            over = self._over_EB[e], int(self._num_over_E[e])
            place = self._descriptors[t], int(self._counted_E[e]), counts_B, self._evictions[t].capacity
            self._num_over_E[e] = at.count_rows(*place, *over)
        self._tables[t].remove(self._images[t], slots_U, counts_B)
        self._counted_E[e] = self._tables[t].num_rows

    def _remove(self, e: int, slots_U: Ints) -> None:
        t = int(self._evicting_E[e])
        self._make_room(t, 2 * slots_U.size)
        counts_B = self._counts_EB[e] if self._evictions[t].capacity else NO_COUNTS
        self._evictions[t].remove(self._images[t], slots_U, counts_B)
        self._counted_E[e] = self._tables[t].num_rows

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
