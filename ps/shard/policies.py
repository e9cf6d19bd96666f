"""Policies: admission and eviction of all tables of a server, around the updates of their rows.

Lives with `Tables`, which calls it only where a table has a policy. Takes no lock but those that it is given.
"""
# S = sections, T = tables, V = ids of all sections, A = ids without a row, E = tables from which rows go

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.ps.jagged import SectionIds
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.admission import Admission
from shardkeep.ps.shard.table.eviction import Eviction, swept_hashes
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.policy_update_kernels import apply, take_rows
from shardkeep.ps.shard.table.table import NO_COUNTS, Table

Locked = Callable[..., AbstractContextManager[None]]
"""Holds the locks of some tables while their rows change."""
_NOWHERE: Ints = np.empty(0, dtype=np.int64)
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
        self._admits_nothing_T: Bools = np.zeros_like(self._admits_T)
        self._swept = -1
        self._rules_T = np.zeros((len(tables), at.RULES), dtype=np.float64)
        self._in_seconds = [t for t, eviction in self._evictions.items() if eviction.in_seconds]
        for t, eviction in self._evictions.items():
            self._rules_T[t] = eviction.rules
        self._periods_E: Ints = np.array([each.period for each in self._evictions.values()], dtype=np.int64)
        self._buckets, self._factor = tables[0].buckets, tables[0].hashes(0, 1)[1] - tables[0].hashes(0, 1)[0]
        self._evicting_E: Ints = np.array(list(self._evictions), dtype=np.int64)
        shape = len(self._evictions), BUCKETS if self._rules_T[:, at.CAPACITY].any() else 0
        self._counts_EB, self._over_EB = np.zeros(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        self._counted_E, self._num_over_E, self._ends_E = np.zeros((3, len(self._evictions)), dtype=np.int64)
        self._slots: Ints = np.empty(1024, dtype=np.int64)

    def new_rows(self, sections: SectionIds) -> Ints:
        """How many rows the first update of a push may add to each section's table."""
        return np.where(self._admits_T[sections.tables_S], 0, np.diff(sections.starts_S1))

    def apply(self, rows: tuple[Any, ...], pushes_U: Floats, absent_S: Ints, update: Update, *, admits: bool) -> None:
        """Updates some sections, and counts the pushes of their rows. The caller holds the tables' locks.

        `rows`: the arguments of `table_kernels.apply`. `admits`: leaves out the rows that are absent from tables with
        admission; their slots become -1, and `absent_S` gets their numbers."""
        admits_T = self._admits_T if admits else self._admits_nothing_T
        more: tuple[Any, ...] = pushes_U, self._clocks(update), self._rules_T, admits_T, absent_S
        apply(*rows, *more)

    def admit(self, sections: SectionIds, slots_V: Ints, absent_S: Ints, pushes_V: Floats, update: Update) -> Ints:
        """Decides on the rows of a push that `apply` has left out. Returns the places of those that become rows. The
        caller holds the tables' locks."""
        places = [_NOWHERE]
        for s in np.flatnonzero(absent_S).tolist():
            first, end = sections.starts_S1[s : s + 2].tolist()
            absent_A = first + np.flatnonzero(slots_V[first:end] < 0)
            pushes_A = pushes_V[absent_A] if pushes_V.size else pushes_V
            chosen_A = self._admit(int(sections.tables_S[s]), sections.ids_V[absent_A], pushes_A, update)
            places.append(absent_A[chosen_A])
        return np.concatenate(places)

    def take(self, sections: SectionIds, values: Floats, places: Ints) -> tuple[SectionIds, Floats]:
        """The ids and values at some places of sections, which rise."""
        starts_S1, dims_S = np.searchsorted(places, sections.starts_S1), self._dims_T[sections.tables_S]
        taken = np.empty(int(np.diff(starts_S1) @ dims_S), dtype=np.float32)
        take_rows(sections.starts_S1, starts_S1, dims_S, places, values, taken)
        return SectionIds(sections.tables_S, starts_S1, sections.ids_V[places]), taken

    def _admit(self, t: int, ids_A: Ints, pushes_A: Floats, update: Update) -> Bools:
        counting = self._counting.get(t, t)
        if counting != t:
            self._make_room(counting, 3 * ids_A.size)
        return self._admissions[t].admit(ids_A, pushes_A, update, self._images[counting])

    def _clocks(self, update: Update) -> Ints:
        """The clock of each table."""
        clocks_T = np.full(len(self._tables), update.step + update.earlier_steps, dtype=np.int64)
        for t in self._in_seconds:
            clocks_T[t] = self._evictions[t].clock(update)
        return clocks_T

    def sweep(self, update: Update) -> None:
        """Removes the rows that go after the updates of a step."""
        step = update.step + update.earlier_steps
        if step <= self._swept or not self._evictions:
            return
        self._swept = step
        with self._locked(*self._evictions):
            self._remove_expired(update)
            for e in np.flatnonzero(self._num_over_E).tolist():
                over_B, self._num_over_E[e] = self._over_EB[e, : self._num_over_E[e]], 0
                t = int(self._evicting_E[e])
                self._remove(e, self._evictions[t].lowest(over_B, self._counts_EB[e], update))

    def _remove_expired(self, update: Update) -> None:
        """Removes what is too old or scores too low. Counts the new rows of each bucket first."""
        ranges_E2 = swept_hashes(self._periods_E, self._buckets, self._factor, update)
        clocks_T = self._clocks(update)
        state = self._counts_EB, self._counted_E, self._over_EB, self._num_over_E, self._ends_E
        place = self._descriptors, self._evicting_E, ranges_E2, clocks_T, self._rules_T
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
