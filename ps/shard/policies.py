"""Policies: admission and eviction of all tables of a server, around the updates of their rows.

Lives with `Tables`, which calls it only where a table has a policy. Takes no lock but those that it is given.
"""
# S = sections, T = tables, V = ids of all sections, E = tables from which rows go, B = buckets

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
from shardkeep.ps.shard.table.admission_kernels import decide
from shardkeep.ps.shard.table.eviction import Eviction, swept_hashes
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.policy_update_kernels import apply, take_rows
from shardkeep.ps.shard.table.table import NO_COUNTS, Table
from shardkeep.ps.shard.table.table_kernels import NUM_CHANGED, REMOVED

Locked = Callable[..., AbstractContextManager[None]]
"""Holds the locks of some tables while their rows change."""
_ENOUGH = 64
"""Rows of a table whose memory is worth a call."""
MakeRoom = Callable[[Ints, Ints], None]
"""Makes room in some tables for so many rows, or for so many pre-images if a snapshot is being taken."""


class Policies:
    """The policies of a server's tables. A table that counts ids for another one has its lock."""

    def __init__(
        self,
        tables: Sequence[Table],
        descriptors: Ints,
        starts: Floats,
        dims_T: Ints,
        images_TC: Ints,
        locked: Locked,
        make_room: MakeRoom,
        make_pre_image_room: MakeRoom,
    ) -> None:
        """`images_TC`: what pushes keep of each table for a snapshot."""
        self._tables, self._descriptors, self._starts, self._images = tables, descriptors, starts, images_TC
        self._dims_T, self._locked = dims_T, locked
        self._make_room, self._make_pre_image_room = make_room, make_pre_image_room
        self._noting_T: Ints = descriptors[:, NUM_CHANGED]
        """Not 0 = a table notes what changes, for an increment."""
        self._removed_T: Ints = descriptors[:, REMOVED]
        admits = [table.spec.admit for table in tables]
        self._admits_T: Bools = np.array([admit is not None for admit in admits], dtype=np.bool_)
        self._admits_nothing_T: Bools = np.zeros_like(self._admits_T)
        counting = {table.counts_for: t for t, table in enumerate(tables) if table.counts_for}
        self._counting_T: Ints = np.array([counting.get(table.spec.name, -1) for table in tables], dtype=np.int64)
        """The table that counts the ids without a row; -1 = none does."""
        bars = [
            0 if admit is None else admit.probability if admit.min_count == 1 else admit.min_count for admit in admits
        ]
        self._bars_T = np.array(bars, dtype=np.float64)
        """The least count of an id that becomes a row, or its chance."""

        self._evictions = {t: Eviction(one, one.spec.evict) for t, one in enumerate(tables) if one.spec.evict}
        self._swept = -1
        self._rules_T = np.zeros((len(tables), at.RULES), dtype=np.float64)
        self._in_seconds = [t for t, eviction in self._evictions.items() if eviction.in_seconds]
        for t, eviction in self._evictions.items():
            self._rules_T[t] = eviction.rules
        self._periods_E: Ints = np.array([each.period for each in self._evictions.values()], dtype=np.int64)
        pinned = [eviction.pinned for eviction in self._evictions.values()]
        self._pinned: Ints = np.concatenate([np.empty(0, dtype=np.int64), *pinned])
        self._pinned_E1: Ints = np.cumsum([0, *(ids.size for ids in pinned)])
        self._buckets, self._factor = tables[0].buckets, tables[0].hashes(0, 1)[1] - tables[0].hashes(0, 1)[0]
        self._evicting_E: Ints = np.array(list(self._evictions), dtype=np.int64)
        self._evicting_T: Ints = np.full(len(tables), -1, dtype=np.int64)
        self._evicting_T[self._evicting_E] = np.arange(self._evicting_E.size)
        shape = len(self._evictions), BUCKETS if self._rules_T[:, at.CAPACITY].any() else 0
        self._counts_EB, self._over_EB = np.zeros(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        self._counted_E, self._num_over_E, self._ends_E = np.zeros((3, len(self._evictions)), dtype=np.int64)
        self._in_buckets = self._counts_EB, self._counted_E, self._over_EB, self._num_over_E
        """The rows of each bucket, up to which slot they are counted, and the buckets that have too many."""
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
        """Decides on the rows of a push that `apply` has left out. Returns the places of those that become rows, which
        rise. The caller holds the tables' locks."""
        counting_S = self._counting_T[sections.tables_S]
        counts_S = (counting_S >= 0) & (absent_S > 0)
        self._make_room(counting_S[counts_S], absent_S[counts_S])
        self._make_pre_image_room(counting_S[counts_S], 3 * absent_S[counts_S])  # a removal keeps two
        places = np.empty(int(absent_S.sum()), dtype=np.int64)
        step = update.step + update.earlier_steps
        count = decide(
            self._descriptors, self._starts, self._images, sections.tables_S, sections.starts_S1, sections.ids_V,
            slots_V, absent_S, pushes_V, step, self._clocks(update), self._counting_T, self._evicting_T, self._bars_T,
            self._rules_T, *self._in_buckets, places,
        )  # fmt: skip
        places = places[:count]
        if self._noting_T[counting_S[counts_S]].any():
            self._note_admitted(sections, places)
        self._give_back(counting_S[counts_S])
        return places

    def _note_admitted(self, sections: SectionIds, places: Ints) -> None:
        """Tells the tables which ids they count no more."""
        bounds = np.searchsorted(places, sections.starts_S1).tolist()
        for s, t in enumerate(sections.tables_S.tolist()):
            if bounds[s] < bounds[s + 1] and self._counting_T[t] >= 0:
                own = places[bounds[s] : bounds[s + 1]]
                self._tables[self._counting_T[t]].changed.note_removed(partial(sections.ids_V.take, own))

    def _give_back(self, tables_T: Ints) -> None:
        """Returns memory that tables need no more, once enough of their rows were removed."""
        for t in tables_T[self._removed_T[tables_T] >= _ENOUGH].tolist():
            self._tables[t].give_back()

    def take(self, sections: SectionIds, values: Floats, places: Ints) -> tuple[SectionIds, Floats]:
        """The ids and values at some places of sections, which rise."""
        starts_S1, dims_S = np.searchsorted(places, sections.starts_S1), self._dims_T[sections.tables_S]
        taken = np.empty(int(np.diff(starts_S1) @ dims_S), dtype=np.float32)
        take_rows(sections.starts_S1, starts_S1, dims_S, places, values, taken)
        return SectionIds(sections.tables_S, starts_S1, sections.ids_V[places]), taken

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
                self._remove_lowest(e, update)

    def _remove_expired(self, update: Update) -> None:
        """Removes what is too old or scores too low. Counts the new rows of each bucket first."""
        ranges_E2 = swept_hashes(self._periods_E, self._buckets, self._factor, update)
        place = self._descriptors, self._evicting_E, ranges_E2, self._clocks(update), self._rules_T
        rest = self._pinned, self._pinned_E1, *self._in_buckets, self._ends_E
        while (count := at.sweep(*place, *rest, self._slots)) > self._slots.size:
            self._slots = np.empty(2 * count, dtype=np.int64)
        if count:
            self._remove_found()

    def _remove_found(self) -> None:
        """Removes the rows that a sweep has found."""
        begins_E = np.concatenate([[0], self._ends_E[:-1]])
        self._make_pre_image_room(self._evicting_E, 2 * (self._ends_E - begins_E))
        if self._noting_T[self._evicting_E].any():
            for t, begin, end in zip(self._evicting_E.tolist(), begins_E.tolist(), self._ends_E.tolist(), strict=True):
                if begin < end:
                    table = self._tables[t]
                    table.changed.note_removed(partial(table.ids_in, self._slots[begin:end]))
        found = self._evicting_E, self._ends_E, self._slots
        at.remove_many(self._descriptors, self._images, *found, self._rules_T, *self._in_buckets)
        self._give_back(self._evicting_E)

    def _remove_lowest(self, e: int, update: Update) -> None:
        """Removes the lowest rows of the buckets that have too many."""
        t = int(self._evicting_E[e])
        over_B, self._num_over_E[e] = self._over_EB[e, : self._num_over_E[e]], 0
        slots_U = self._evictions[t].lowest(over_B, self._counts_EB[e], update)
        self._make_pre_image_room(np.array([t]), np.array([2 * slots_U.size]))
        self._tables[t].evicted_rows += slots_U.size
        self._tables[t].remove(
            self._images[t], slots_U, self._counts_EB[e] if self._evictions[t].capacity else NO_COUNTS
        )
        self._counted_E[e] = self._tables[t].num_rows

    def pushes_of(self, sections: SectionIds, pushes: Sequence[SectionIds]) -> Floats:
        """How many of the pushes have each id of their sum."""
        pushes_V = np.zeros(sections.ids_V.size, dtype=np.float32)
        of_sum = sections.tables_S, sections.starts_S1, sections.ids_V
        for push in pushes:
            at.count_pushes(*of_sum, push.tables_S, push.starts_S1, push.ids_V, pushes_V)
        return pushes_V
