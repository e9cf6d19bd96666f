"""Tables: all tables of one server. One kernel call pulls or updates many of them. Thread safe.

A row is created in `apply`, by the first gradient of its id. One table's storage is in table/table.py.
Knows no message and no gate.
"""
# S = sections, T = tables, A = tables whose every row decays, V = ids of all sections

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.base.array_kernels import all_finite
from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import JobError
from shardkeep.base.machine.topology import usable_cores
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import NO_PUSHES, FoundSlots, Gradients, SectionIds
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.table import row_kernels, table_kernels
from shardkeep.ps.server.table.changed_rows import ChangedRows
from shardkeep.ps.server.table.descriptor_kernels import CURSOR_DTYPE, DESCRIPTOR_DTYPE
from shardkeep.ps.server.table.optimizers.optimizer import RowUpdate
from shardkeep.ps.server.table.table import Table

if TYPE_CHECKING:  # their kernels take a fifth of a second
    from shardkeep.ps.server.table.policies.admission import Admission
    from shardkeep.ps.server.table.policies.eviction import Eviction

MOST_ROWS = 1_000_000
"""Of a table whose every row decays, on one server: each update reads and writes all of them."""
NO_SLOTS = np.empty(0, dtype=np.int64)
FEW_ROWS = 4096  # for which one kernel call under all locks costs less than one for each lock
MAX_LOCKS = 8
"""Each costs a small message about a microsecond. There are no more than cores, or tables."""


class SharedLock:
    """A thread holds it alone in a `with`, or shares it between `share` and `unshare`. One that wants it alone waits
    for none that comes later to read."""

    def __init__(self) -> None:
        self._turn, self._counting, self._free = threading.Lock(), threading.Lock(), threading.Lock()
        self._readers = 0

    def __enter__(self) -> None:
        with self._turn:
            self._free.acquire()

    def __exit__(self, *_: object) -> None:
        self._free.release()

    def share(self) -> None:
        with self._turn, self._counting:
            if not self._readers:
                self._free.acquire()
            self._readers += 1

    def unshare(self) -> None:
        with self._counting:
            self._readers -= 1
            if not self._readers:
                self._free.release()


class Tables(Sequence[Table]):
    """The tables of a server, each under one of a few locks."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        buckets: tuple[int, int] = (0, BUCKETS),
        moments: Collection[str] = (),
    ) -> None:
        """`buckets`: placement buckets [first, end) of the server. `moments`: names of the tables in whose pushes the
        mean square of a row's gradient follows it."""
        self.earlier_steps = 0
        """Steps of the jobs before, whose rows these continue."""
        held, named = held_tables(specs), len(specs)
        self._descriptors = np.zeros(len(held), dtype=DESCRIPTOR_DTYPE)
        self._rules = self._descriptors["policies"]["rules"]
        self._tables = [
            Table(spec, seed=seed, descriptors=self._descriptors[t : t + 1], buckets=buckets, counts_for=counts_for)
            for t, (spec, counts_for) in enumerate(held)
        ]
        specs = [spec for spec, _ in held]
        self._packed = any(table.layout.precision for table in self._tables)
        self.dims_T: Ints = self._descriptors["dim"].copy()
        self._widths_T: Ints = self.dims_T + np.array([spec.name in moments for spec in specs], dtype=np.int64)
        """Values of a row's gradient."""
        self._descriptors["width"] = self._widths_T
        self._optimizers = list(dict.fromkeys(spec.optimizer for spec in specs))
        self._optimizer_T = np.array([self._optimizers.index(spec.optimizer) for spec in specs], dtype=np.int64)
        count = min(MAX_LOCKS, len(usable_cores()), max(named, 1))
        self._locks = [SharedLock() for _ in range(count)]
        self._changes = [threading.Lock() for _ in range(count)]
        """A thread that changes rows holds a table's lock and this one. A thread that takes rows of a snapshot holds
        only this one, so pulls do not wait for a snapshot."""
        self._bounds = np.array([named * lock // count for lock in range(count + 1)])
        locks = np.repeat(np.arange(count), np.diff(self._bounds)).tolist()
        lock_of = dict(zip([spec.name for spec in specs], locks, strict=False))
        self._lock_T = [lock_of[table.counts_for or table.spec.name] for table in self._tables]
        """A table that counts ids for another one has its lock."""
        decaying_T = np.array([spec.optimizer.decays_all_rows for spec in specs], dtype=np.bool_)
        by_lock = [np.flatnonzero(decaying_T & (np.array(self._lock_T) == lock)) for lock in range(count)]
        self._decaying = [tables_A for tables_A in by_lock if tables_A.size]
        self.changed = ChangedRows([table.changed for table in self._tables])
        self._snapshot: Snapshot | None = None
        self._has_policies = any(spec.admit or spec.evict for spec in specs)
        self._admissions, self._evictions = self._open_policies() if self._has_policies else ({}, {})
        self._swept, self._expired_slots = -1, np.empty(1024, dtype=np.int64)

    def __getitem__(self, t: int) -> Table:  # type: ignore[override]
        return self._tables[t]

    def __len__(self) -> int:
        return len(self._tables)

    def pull(self, sections: SectionIds, values: Floats) -> FoundSlots:
        """Writes the weights of all ids into `values` (flat, table after table). Changes no table.

        An id without a row gets its computed initial value."""
        slots_V = np.empty(sections.ids_V.size, dtype=np.int64)
        absent_S = np.empty(sections.tables_S.size, dtype=np.int64)
        for part, ids, where in self._parts(sections, self.dims_T):
            starts_S1 = sections.starts_S1[part.start : part.stop + 1] - ids.start
            of_part = sections.tables_S[part], starts_S1, sections.ids_V[ids], slots_V[ids], absent_S[part]
            table_kernels.pull(self._descriptors, *of_part, values[where])
        return FoundSlots(sections, slots_V, absent_S)

    def apply(self, pushes: Sequence[Gradients], *, step: int, decay_share: float = 1.0) -> None:
        """Adds the gradients row by row, in the order of `pushes`, then makes one optimizer update per row.

        Creates the rows of new ids. Skips and counts rows whose gradient is not finite. `decay_share`: the part of the
        step's ranks whose gradients are in `pushes`; the rows decay by this share of `weight_decay`. In tables with
        `weight_decay_on: table` the other rows get an update with gradient 0."""
        if not pushes:
            return
        gradients, update = pushes[0], RowUpdate(step, pushes[0].lr_factor, decay_share, self.earlier_steps)
        if len(pushes) > 1:
            gradients = sum_of(self._widths_T, pushes, counted=self._has_policies)
        if not all_finite(gradients.values.view(np.uint32)):
            gradients = self._finite(gradients)
        self._apply(gradients, update)
        if self._evictions:
            self._sweep(update)

    def snapshot(self, base: str = "") -> Snapshot:
        """Fixes the rows as they are now. Pushes then keep pre-images until the snapshot is taken or dropped.

        Drops any earlier snapshot. No thread may call `apply` during this call; pulls may continue.

        `base`: a checkpoint's id. The snapshot then has only the rows that changed since, if `changed` knows them."""
        if self._snapshot is not None:
            self._snapshot.drop("another snapshot came")
        locks = [self._changes[self._lock_T[t]] for t in range(len(self))]
        changed = self.changed.hand_over(base)
        removed, earlier = self.changed.removed, self.earlier_steps
        self._snapshot = Snapshot(self._tables, locks, changed, removed, earlier_steps=earlier)
        return self._snapshot

    def _apply(self, gradients: Gradients, update: RowUpdate) -> None:
        """Updates the rows that are there, then those that admission adds, under the locks of the tables: no other push
        comes between."""
        updated: list[Ints] = []
        scalars_TK = self._scalars(update)
        scalars_SK = scalars_TK[gradients.sections.tables_S]
        for part, ids, where in self._parts(gradients.sections, self._widths_T, changing=True):
            own = gradients.part(part, ids, where)
            slots_V, absent_S = self._update_rows(own, scalars_SK[part], update)
            updated.append(slots_V)
            if absent_S.any():
                self._admit(own, slots_V, absent_S, scalars_SK[part])
        if self._decaying:
            self._decay_others(gradients.sections, np.concatenate([NO_SLOTS, *updated]), scalars_TK, update)

    def _update_rows(self, gradients: Gradients, scalars_SK: Floats, update: RowUpdate) -> tuple[Ints, Ints]:
        """Makes room, then updates rows of tables whose locks the caller holds. Returns their slots, and the number of
        absent rows on which admission decides, whose slots are -1, in each section."""
        sections, pulled = gradients.sections, gradients.pulled
        tables_S, rows_S = sections.tables_S, sections.counts
        slots_V = np.empty(sections.ids_V.size, dtype=np.int64) if pulled is None else pulled.slots_V
        absent_S = np.empty(tables_S.size, dtype=np.int64)
        if self._has_policies:  # rows may have moved since the pull
            new_S = np.where(self._rules["min_count"][tables_S] > 0, 0, rows_S)
        else:
            new_S = rows_S if pulled is None else pulled.absent_S
        self._make_room(tables_S, new_S)
        self._note_step(tables_S, update)
        self._make_pre_image_room(tables_S, rows_S)
        place = tables_S, sections.starts_S1, sections.ids_V, slots_V, pulled is not None
        numbers = gradients.values, scalars_SK, gradients.pushes_V
        table_kernels.apply(self._descriptors, *place, *numbers, absent_S)
        return slots_V, absent_S

    def _admit(self, gradients: Gradients, slots_V: Ints, absent_S: Ints, scalars_SK: Floats) -> None:
        """Adds and updates the rows that admission makes of absent ones. The caller holds the tables' locks."""
        sections, pushes_V = gradients.sections, gradients.pushes_V
        values_S1 = _value_starts(sections, self._widths_T)
        for s in np.flatnonzero(absent_S).tolist():
            t, rows = int(sections.tables_S[s]), slice(sections.starts_S1[s], sections.starts_S1[s + 1])
            grad_UD = gradients.values[values_S1[s] : values_S1[s + 1]].reshape(-1, self._widths_T[t])
            pushes_U = pushes_V[rows] if pushes_V.size else pushes_V
            place = sections.ids_V[rows], slots_V[rows], grad_UD
            self._admissions[t].update(*place, scalars_SK[s], pushes_U, int(absent_S[s]))

    def _sweep(self, update: RowUpdate) -> None:
        """Removes the rows that go after the updates of a step."""
        step = update.step + update.earlier_steps
        if step <= self._swept:
            return
        self._swept, evicting_E = step, np.array(list(self._evictions), dtype=np.int64)
        with self.locked(*self._evictions):
            self._note_step(evicting_E, update)
            for t, slots_U in self._expired(evicting_E):
                self._evictions[t].remove(slots_U)
            for t in evicting_E[self._rules["buckets"]["num_full"][evicting_E] > 0].tolist():
                self._evictions[t].remove_lowest()

    def _expired(self, evicting_E: Ints) -> Iterator[tuple[int, Ints]]:
        """The slots of rows that are too old or score too low, by table, after a look at this step's buckets."""
        from shardkeep.ps.server.table.policies.policy_kernels import sweep

        ends_E = np.zeros_like(evicting_E)
        while (count := sweep(self._descriptors, evicting_E, ends_E, self._expired_slots)) > self._expired_slots.size:
            self._expired_slots = np.empty(2 * count, dtype=np.int64)
        begin = 0
        for t, end in zip(evicting_E.tolist() if count else (), ends_E.tolist(), strict=False):
            if begin < end:
                yield t, self._expired_slots[begin:end]
            begin = end

    def _decay_others(self, sections: SectionIds, slots_V: Ints, scalars_TK: Floats, update: RowUpdate) -> None:
        """Updates the rows that are not in `slots_V`, with gradient 0, of tables whose every row decays."""
        for tables_A in self._decaying:
            with self.locked(*tables_A.tolist()):
                rows_A = self._descriptors["count"][tables_A]
                if (rows_A > MOST_ROWS).any():
                    raise self._too_large_to_decay(tables_A[rows_A.argmax()])
                self._note_step(tables_A, update)
                self._make_pre_image_room(tables_A, rows_A)
                updated = sections.tables_S, sections.starts_S1, slots_V
                table_kernels.decay_others(self._descriptors, tables_A, *updated, scalars_TK)

    def _too_large_to_decay(self, t: int) -> JobError:
        return JobError(
            f"table {self[t].spec.name}: {self[t].num_rows} rows on one server with optimizer.weight_decay_on: table; "
            f"allowed: {MOST_ROWS}; set weight_decay_on: touched, or use more servers"
        )

    def _open_policies(self) -> tuple[dict[int, Admission], dict[int, Eviction]]:
        """What decides on new rows, and on rows that go, by table."""
        from shardkeep.ps.server.table.policies.admission import Admission
        from shardkeep.ps.server.table.policies.eviction import Eviction

        counting = {table.counts_for: table for table in self._tables}
        numbered = list(enumerate(self._tables))
        admissions = {t: Admission(table, counting[table.spec.name]) for t, table in numbered if table.spec.admit}
        return admissions, {t: Eviction(table) for t, table in numbered if table.spec.evict}

    @contextlib.contextmanager
    def locked(self, *tables: int) -> Iterator[None]:
        """Holds the locks of tables, of all where none is named, while their rows change: pulls and pushes wait."""
        with contextlib.ExitStack() as held:
            for lock in sorted({self._lock_T[t] for t in tables or range(len(self))}):
                held.enter_context(self._locks[lock])
                held.enter_context(self._changes[lock])
            yield

    def _make_pre_image_room(self, tables_S: Ints, rows_S: Ints) -> None:
        if self._snapshot is not None and not self._snapshot.released:
            for t, rows in zip(tables_S.tolist(), rows_S.tolist(), strict=True):
                self._tables[t].make_pre_image_room(rows)

    def _note_step(self, tables_S: Ints, update: RowUpdate) -> None:
        """Tells the kernels the step, by which they round, and the clock of policies. The caller holds the
        tables' locks."""
        if self._packed or self._has_policies:
            self._descriptors["step"][tables_S] = step = update.earlier_steps + update.step
            in_seconds_S = self._rules["in_seconds"][tables_S]
            self._rules["clock"][tables_S] = np.where(in_seconds_S, int(time.time()), step)

    def _make_room(self, tables_S: Ints, rows_S: Ints) -> None:
        counts_T, room_T = self._descriptors["count"], self._descriptors["index"]["room"]
        tight_S = (counts_T[tables_S] + rows_S > room_T[tables_S]) & (rows_S > 0)
        for t, rows in zip(tables_S[tight_S].tolist(), rows_S[tight_S].tolist(), strict=True):
            self._tables[t].make_room(rows)

    def _parts(
        self, sections: SectionIds, widths_T: Ints, *, changing: bool = False
    ) -> Iterator[tuple[slice, slice, slice]]:
        """By lock, which is held: its sections, ids and values, `widths_T` a row. Few rows come together."""
        starts, values_S1 = sections.starts_S1, _value_starts(sections, widths_T)
        bounds, together = np.searchsorted(sections.tables_S, self._bounds).tolist(), sections.ids_V.size <= FEW_ROWS
        for lock, (first, end) in enumerate([(0, bounds[-1])] if together else itertools.pairwise(bounds)):
            which = slice(None) if together else slice(lock, lock + 1)
            if first < end:
                held: list[Any] = self._locks[which] + (self._changes[which] if changing else [])
                for each in held:
                    each.__enter__() if changing else each.share()
                try:
                    yield (
                        slice(first, end),
                        slice(int(starts[first]), int(starts[end])),
                        slice(int(values_S1[first]), int(values_S1[end])),
                    )
                finally:
                    for each in held:
                        each.__exit__(None, None, None) if changing else each.unshare()

    def _scalars(self, update: RowUpdate) -> Floats:
        """The arguments of the optimizers' kernels for an update, one row per table."""
        by_optimizer = [np.array(optimizer.scalars(update), dtype=np.float32) for optimizer in self._optimizers]
        scalars_CK = np.zeros((len(by_optimizer), max(map(len, by_optimizer), default=0)), dtype=np.float32)
        for c, scalars in enumerate(by_optimizer):
            scalars_CK[c, : scalars.size] = scalars
        scalars_TK: Floats = scalars_CK[self._optimizer_T]
        return scalars_TK

    def _finite(self, gradients: Gradients) -> Gradients:
        """The gradients without the rows that are not finite. Works table by table, because this is rare."""
        sections, values_S1 = gradients.sections, _value_starts(gradients.sections, self._widths_T)
        finite_V, values = np.empty(sections.ids_V.size, dtype=np.bool_), []
        for s, t in enumerate(sections.tables_S.tolist()):
            finite_U = finite_V[sections.starts_S1[s] : sections.starts_S1[s + 1]]
            grad_UD = gradients.values[values_S1[s] : values_S1[s + 1]].reshape(-1, self._widths_T[t])
            omitted = finite_U.size - row_kernels.finite_rows(grad_UD, finite_U)
            with self._locks[self._lock_T[t]]:
                self._tables[t].skipped_rows += omitted
            values.append(grad_UD[finite_U].reshape(-1))
        starts_S1 = np.concatenate([[0], np.cumsum(finite_V)])[sections.starts_S1]
        kept = SectionIds(sections.tables_S, starts_S1, sections.ids_V[finite_V])
        pushes_V = gradients.pushes_V[finite_V] if gradients.pushes_V.size else NO_PUSHES
        return Gradients(kept, np.concatenate(values), pushes_V=pushes_V)

    def figures(self) -> list[dict[str, Any]]:
        """Rows, bytes and index entries of each table that a job names, as JSON types, with what its policies did.

        The bytes include those of the ids that are counted for it, whose number is `candidates`."""
        tables: list[dict[str, Any]] = []
        for t, table in enumerate(self._tables):
            with self._locks[self._lock_T[t]]:
                figures = {"rows": table.num_rows, "bytes": table.size_bytes, "entries": table.index.num_entries}
                counts = {name: count for name, count in table.counts().items() if name != "skipped_rows"}
            if table.counts_for:
                (owner,) = (each for each in tables if each["name"] == table.counts_for)
                owner |= {"candidates": figures["rows"], "bytes": owner["bytes"] + figures["bytes"]}
            else:
                tables.append({"name": table.spec.name, **figures, **counts})
        return tables

    def digests(self) -> dict[str, int]:
        """The digest of each table's rows, by name. The digests of all servers add up modulo 2**128."""
        digests = {}
        for t, table in enumerate(self._tables):
            with self._locks[self._lock_T[t]]:
                digests[table.spec.name] = table.digest()
        return digests


def held_tables(specs: Sequence[TableSpec]) -> list[tuple[TableSpec, str]]:
    """The tables of servers: those of a job, which messages name by number, then those that count ids without a row of
    one of them, each with the name of that one."""
    counting = [(counts, spec.name) for spec in specs if (counts := spec.candidates) is not None]
    return [*((spec, "") for spec in specs), *counting]


def _value_starts(sections: SectionIds, widths_T: Ints) -> Ints:
    """Where the values of each section begin, and where the last one ends."""
    values_S1 = np.zeros(sections.starts_S1.size, dtype=np.int64)
    np.cumsum(sections.counts * widths_T[sections.tables_S], out=values_S1[1:])
    return values_S1


def sum_of(widths_T: Ints, pushes: Sequence[Gradients], *, counted: bool = False) -> Gradients:
    """The sum of pushes, row by row in their order. `widths_T`: values of a row's gradient. `counted`: with the number
    of pushes that have each id."""
    cursors, num_sections, num_rows, size = np.empty(len(pushes), dtype=CURSOR_DTYPE), 0, 0, 0
    for p, push in enumerate(pushes):
        own = push.sections
        table_kernels.begin_push(cursors, p, own.tables_S, own.starts_S1, own.ids_V, push.values)
        num_sections, num_rows = num_sections + own.tables_S.size, num_rows + own.ids_V.size
        size += push.values.size
    tables_S, starts_S1 = np.empty(num_sections, dtype=np.int64), np.empty(num_sections + 1, dtype=np.int64)
    ids_V, values = np.empty(num_rows, dtype=np.int64), np.empty(size, dtype=np.float32)
    pushes_V = np.zeros(num_rows, dtype=np.float32) if counted else NO_PUSHES
    count = table_kernels.sum_pushes(widths_T, cursors, tables_S, starts_S1, ids_V, values, pushes_V)
    sections = SectionIds(tables_S[:count], starts_S1[: count + 1], ids_V[: starts_S1[count]])
    size = int((sections.counts * widths_T[sections.tables_S]).sum())
    return Gradients(sections, values[:size], pushes_V=pushes_V[: sections.ids_V.size])
