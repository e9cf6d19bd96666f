"""Tables: all tables of one server. One kernel call pulls or updates many of them. Thread safe.

A row is created in `apply`, by the first gradient of its id. One table's storage is in table/table.py.
Knows no message and no gate.
"""
# S = sections, T = tables, V = ids of all sections

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.array_kernels import all_finite
from shardkeep.base.arrays import Floats, Ids, Ints
from shardkeep.base.machine.versions import usable_cores
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import SectionIds
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.snapshot.snapshot import Snapshot
from shardkeep.ps.shard.table import pre_image_kernels
from shardkeep.ps.shard.table import table_kernels as at
from shardkeep.ps.shard.table.changed_rows import ChangedRows
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.shard.table.table import NO_SQUARES, Table
from shardkeep.ps.shard.table.whole_decay import decay_rows, slots_besides

if TYPE_CHECKING:
    from shardkeep.ps.shard.policies import Policies

MOST_LOCKS = 4
"""The number of RPC threads: each can work on other tables. A machine with fewer cores has fewer locks."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull: the slot of each id (-1 if it had no row) and the number of absent ids per section.

    A slot holds another row, or none, once its row or the last one has gone: `apply` compares the ids."""

    sections: SectionIds
    slots_V: Ints
    absent_S: Ints


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the sections' rows, flat float32.

    `pulled`: the result of an earlier pull of the same sections, if any. `squares_V`: the mean squared gradient of each
    row, float32 (V,), if the gradients are sums over several steps; else empty. `lr_factor`: multiplies the learning
    rate of the update; equal in all pushes that are applied together. `pushes_V`: how many pushes a row is the sum of,
    float32 (V,); empty = one, or nobody asks."""

    sections: SectionIds
    values: Floats
    pulled: Pulled | None = None
    squares_V: Floats = field(default_factory=lambda: NO_SQUARES)
    lr_factor: float = 1.0
    pushes_V: Floats = field(default_factory=lambda: NO_PUSHES)


NO_PUSHES: Floats = np.empty(0, dtype=np.float32)
"""Each row comes from one push."""
NO_GRADIENTS = Gradients(
    SectionIds(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64)), np.empty(0, np.float32)
)


class Tables(Sequence[Table]):
    """The tables of a server, each under one of a few locks."""

    def __init__(self, specs: Sequence[TableSpec], *, seed: int, buckets: tuple[int, int] = (0, BUCKETS)) -> None:
        """`buckets`: placement buckets [first, end) of the server."""
        self.earlier_steps = 0
        """Steps of the jobs before, whose rows these continue."""
        counting = {spec.name: counts for spec in specs if (counts := spec.candidates) is not None}
        counts_for_T = ["" for _ in specs] + list(counting)
        specs = [*specs, *counting.values()]  # those that count come behind the tables that messages name
        self._descriptors = np.zeros((len(specs), at.COLUMNS), dtype=np.int64)
        self._starts = np.zeros((len(specs), at.STARTS), dtype=np.float32)
        self._tables = [
            Table(
                spec,
                seed=seed,
                descriptor=self._descriptors[t],
                starts=self._starts[t],
                buckets=buckets,
                counts_for=counts_for,
            )
            for t, (spec, counts_for) in enumerate(zip(specs, counts_for_T, strict=True))
        ]
        self._packed = any(table.layout.precision for table in self._tables)
        self._decaying = [t for t, spec in enumerate(specs) if spec.decays_all_rows]
        self.dims_T: Ints = self._descriptors[:, at.DIM].copy()
        configs = list(dict.fromkeys(spec.optimizer for spec in specs))
        self._optimizers = [(config, OPTIMIZERS[config.name].scalars) for config in configs]
        self._optimizer_T = np.array([configs.index(spec.optimizer) for spec in specs], dtype=np.int64)
        named = len(specs) - len(counting)
        count = min(MOST_LOCKS, usable_cores(), max(named, 1))
        self._locks = [threading.Lock() for _ in range(count)]
        self._changes = [threading.Lock() for _ in range(count)]
        """A thread that changes rows holds a table's lock and this one. A thread that takes rows of a snapshot holds
        only this one, so pulls do not wait for a snapshot."""
        self._bounds = np.array([named * lock // count for lock in range(count + 1)])
        locks = np.repeat(np.arange(count), np.diff(self._bounds)).tolist()
        self._lock_T = [*locks, *(locks[t] for t, spec in enumerate(specs[:named]) if spec.name in counting)]
        """A table that counts ids for another one has its lock."""
        self.changed = ChangedRows([table.changed for table in self._tables])
        self._images = np.zeros((len(specs), pre_image_kernels.COLUMNS), dtype=np.int64)
        self._place = self._descriptors, self._starts, self._images
        self._snapshot: Snapshot | None = None
        self._policies = self._open_policies()

    def __getitem__(self, t: int) -> Table:  # type: ignore[override]
        return self._tables[t]

    def __len__(self) -> int:
        return len(self._tables)

    def pull(self, sections: SectionIds, values: Floats) -> Pulled:
        """Writes the weights of all ids into `values` (flat, table after table). Changes no table.

        An id without a row gets its computed initial value."""
        slots_V = np.empty(sections.ids_V.size, dtype=np.int64)
        absent_S = np.empty(sections.tables_S.size, dtype=np.int64)
        for part, ids, where in self._parts(sections):
            starts_S1 = sections.starts_S1[part.start : part.stop + 1] - ids.start
            at.pull(
                self._descriptors, self._starts, sections.tables_S[part], starts_S1, sections.ids_V[ids], slots_V[ids],
                absent_S[part], values[where],
            )  # fmt: skip
        return Pulled(sections, slots_V, absent_S)

    def apply(self, pushes: Sequence[Gradients], *, step: int, decay_share: float = 1.0) -> None:
        """Adds the gradients row by row, in the order of `pushes`, then makes one optimizer update per row.

        Creates the rows of new ids. Skips and counts rows whose gradient is not finite. `decay_share`: the part of the
        step's ranks whose gradients are in `pushes`; the rows decay by this share of `weight_decay`. In tables with
        `weight_decay_on: table` the other rows get an update with gradient 0."""
        if not pushes:
            return
        gradients, update = pushes[0], Update(step, pushes[0].lr_factor, decay_share, self.earlier_steps)
        for other in pushes[1:]:
            gradients = sum_of(self.dims_T, gradients, other)
        if self._policies is not None and len(pushes) > 1:
            pushes_V = self._policies.pushes_of(gradients.sections, [push.sections for push in pushes])
            gradients = replace(gradients, pushes_V=pushes_V)
        if not all_finite(gradients.values.view(np.uint32)):
            gradients = self._finite(gradients)
        self._apply(gradients, update)
        if self._policies is not None:
            self._policies.sweep(update)

    def snapshot(self, base: str = "") -> Snapshot:
        """Fixes the rows as they are now. Pushes then keep pre-images until the snapshot is taken or dropped.

        Drops any earlier snapshot. No thread may call `apply` during this call; pulls may continue.

        `base`: a checkpoint's id. The snapshot then has only the rows that changed since, if `changed` knows them."""
        if self._snapshot is not None:
            self._snapshot.drop("another snapshot came")
        locks = [self._changes[self._lock_of(t)] for t in range(len(self))]
        changed = self.changed.hand_over(base)
        self._snapshot = Snapshot(self._tables, self._images, locks, changed, self.changed.removed)
        self._snapshot.earlier_steps = self.earlier_steps
        return self._snapshot

    @property
    def pre_imaged(self) -> npt.NDArray[np.bool_]:
        """Whether pushes keep pre-images for a snapshot, for each table."""
        return np.asarray(self._images.any(axis=1))

    def _apply(self, gradients: Gradients, update: Update) -> None:
        sections, pulled = gradients.sections, gradients.pulled
        if pulled is not None:
            slots_V, new_S = pulled.slots_V, pulled.absent_S
        else:
            slots_V, new_S = np.empty(sections.ids_V.size, dtype=np.int64), np.diff(sections.starts_S1)
        updated, scalars_SK = [(sections, slots_V)], self._scalars(sections.tables_S, update)
        for part, ids, where in self._parts(sections, changing=True):
            tables_S, ids_U, slots_U = sections.tables_S[part], sections.ids_V[ids], slots_V[ids]
            starts_S1 = sections.starts_S1[part.start : part.stop + 1] - ids.start
            values, scalars_PK = gradients.values[where], scalars_SK[part]
            squares_U = gradients.squares_V[ids] if gradients.squares_V.size else NO_SQUARES
            found = slots_U, pulled is not None
            if self._policies is None:
                self._prepare(tables_S, starts_S1, new_S[part], update)
                at.apply(*self._place, tables_S, starts_S1, ids_U, *found, values, squares_U, scalars_PK)
            else:
                pushes_U = gradients.pushes_V[ids] if gradients.pushes_V.size else NO_PUSHES
                own = Gradients(SectionIds(tables_S, starts_S1, ids_U), values, None, squares_U, pushes_V=pushes_U)
                updated += self._apply_with_policies(self._policies, own, found, scalars_PK, update)
        if self._decaying:
            self._decay_others(updated, update)

    def _apply_with_policies(
        self, policies: Policies, gradients: Gradients, found: tuple[Ints, bool], scalars_SK: Floats, update: Update
    ) -> list[tuple[SectionIds, Ints]]:
        """Updates the rows that are there, then those that admission adds, under the locks of the tables: no other push
        comes between. Returns the sections of the added rows, and their slots.

        `found`: room for the slots, and whether those of an earlier pull are in it."""
        absent_S = np.zeros(gradients.sections.tables_S.size, dtype=np.int64)

        def update_rows(part: Gradients, found: tuple[Ints, bool], new_S: Ints, *, admits: bool) -> None:
            sections = part.sections
            place = sections.tables_S, sections.starts_S1
            self._prepare(*place, new_S, update)
            rows = (*self._place, *place, sections.ids_V, *found, part.values, part.squares_V, scalars_SK)
            policies.apply(rows, part.pushes_V, absent_S, update, admits=admits)

        sections, slots_V = gradients.sections, found[0]
        update_rows(gradients, found, policies.new_rows(sections), admits=True)
        if not absent_S.any():
            return []
        places = policies.admit(sections, slots_V, absent_S, gradients.pushes_V, update)
        if not places.size:
            return []
        taken, values = policies.take(sections, gradients.values, places)
        squares_V, pushes_V = (
            each[places] if each.size else each for each in (gradients.squares_V, gradients.pushes_V)
        )
        admitted, new_V = Gradients(taken, values, None, squares_V, pushes_V=pushes_V), np.empty_like(places)
        update_rows(admitted, (new_V, False), np.diff(taken.starts_S1), admits=False)
        return [(taken, new_V)]

    def _prepare(self, tables_S: Ints, starts_S1: Ints, new_S: Ints, update: Update) -> None:
        """Makes room for an update that adds at most `new_S` rows to each section's table. The caller holds the tables'
        locks."""
        self._make_room(tables_S, new_S)
        self._note_step(tables_S, update)
        if self._snapshot is not None:
            self._make_pre_image_room(tables_S, np.diff(starts_S1))

    def _decay_others(self, updated: Sequence[tuple[SectionIds, Ints]], update: Update) -> None:
        """Updates the rows that are not in `updated`, with gradient 0, of tables whose every row decays."""
        for t, scalars_K in zip(self._decaying, self._scalars(np.array(self._decaying), update), strict=True):
            touched_U = np.concatenate([_slots_of(t, sections, slots_V) for sections, slots_V in updated])
            with self.locked(t):
                self._note_step(np.array([t]), update)
                for slots_U in slots_besides(self._tables[t], touched_U):
                    self._make_pre_image_room(np.array([t]), np.array([slots_U.size]))
                    decay_rows(self._tables[t], self._images[t], slots_U, scalars_K)

    def _open_policies(self) -> Policies | None:
        """None = no table has any."""
        if not any(table.spec.admit or table.spec.evict for table in self._tables):
            return None
        from shardkeep.ps.shard.policies import Policies  # its kernels take a fifth of a second

        place = self._descriptors, self._starts, self.dims_T, self._images
        return Policies(self._tables, *place, self.locked, self._make_room, self._make_pre_image_room)

    @contextlib.contextmanager
    def locked(self, *tables: int) -> Iterator[None]:
        """Holds the locks of tables, of all where none is named, while their rows change: pulls and pushes wait."""
        with contextlib.ExitStack() as held:
            for lock in sorted({self._lock_of(t) for t in tables or range(len(self))}):
                held.enter_context(self._locks[lock])
                held.enter_context(self._changes[lock])
            yield

    def _make_pre_image_room(self, tables_S: Ints, rows_S: Ints) -> None:
        if self._snapshot is not None and not self._snapshot.over:
            self._snapshot.make_room(tables_S, rows_S)

    def _note_step(self, tables_S: Ints, update: Update) -> None:
        """Tells the kernels the step, by which they round. The caller holds the tables' locks."""
        if self._packed:
            self._descriptors[tables_S, at.STEP] = update.earlier_steps + update.step

    def _make_room(self, tables_S: Ints, rows_S: Ints) -> None:
        tight_S = (self._descriptors[tables_S, at.COUNT] + rows_S > self._descriptors[tables_S, at.ROOM]) & (rows_S > 0)
        for t, rows in zip(tables_S[tight_S].tolist(), rows_S[tight_S].tolist(), strict=True):
            self._tables[t].make_room(rows)

    def _parts(self, sections: SectionIds, *, changing: bool = False) -> Iterator[tuple[slice, slice, slice]]:
        """For each lock in turn: its sections, their ids and their values. Holds the lock during the iteration."""
        starts = sections.starts_S1
        values_S1 = np.zeros(starts.size, dtype=np.int64)
        np.cumsum(np.diff(starts) * self.dims_T[sections.tables_S], out=values_S1[1:])
        bounds = np.searchsorted(sections.tables_S, self._bounds).tolist()
        for lock, change, first, end in zip(self._locks, self._changes, bounds, bounds[1:], strict=False):
            if first < end:
                with lock, change if changing else contextlib.nullcontext():
                    yield (
                        slice(first, end),
                        slice(int(starts[first]), int(starts[end])),
                        slice(int(values_S1[first]), int(values_S1[end])),
                    )

    def _scalars(self, tables_S: Ints, update: Update) -> Floats:
        """The arguments of the optimizers' kernels for an update, one row per section."""
        found = [np.array(scalars(config, update), dtype=np.float32) for config, scalars in self._optimizers]
        scalars_CK = np.zeros((len(found), max(map(len, found), default=0)), dtype=np.float32)
        for c, scalars in enumerate(found):
            scalars_CK[c, : scalars.size] = scalars
        return scalars_CK[self._optimizer_T[tables_S]]

    def _finite(self, gradients: Gradients) -> Gradients:
        """The gradients without the rows that are not finite. Works table by table, because this is rare."""
        sections, at_value = gradients.sections, 0
        parts: list[tuple[Ids, Floats]] = []
        finite_V = np.empty(sections.ids_V.size, dtype=np.bool_)
        for s, t in enumerate(sections.tables_S.tolist()):
            ids_U = sections.ids_V[sections.starts_S1[s] : sections.starts_S1[s + 1]]
            size = ids_U.size * int(self.dims_T[t])
            grad_UD = gradients.values[at_value : at_value + size].reshape(ids_U.size, -1)
            with self._locks[self._lock_of(t)]:
                parts.append(self._tables[t].finite(ids_U, grad_UD))
            finite_V[sections.starts_S1[s] : sections.starts_S1[s + 1]] = np.isin(ids_U, parts[-1][0])
            at_value += size
        starts_S1 = np.cumsum([0] + [ids_U.size for ids_U, _ in parts])
        kept = replace(sections, starts_S1=starts_S1, ids_V=np.concatenate([ids_U for ids_U, _ in parts]))
        squares_V = gradients.squares_V[finite_V] if gradients.squares_V.size else NO_SQUARES
        pushes_V = gradients.pushes_V[finite_V] if gradients.pushes_V.size else NO_PUSHES
        values = np.concatenate([grad_UD.reshape(-1) for _, grad_UD in parts])
        return Gradients(kept, values, None, squares_V, pushes_V=pushes_V)

    def figures(self) -> list[dict[str, Any]]:
        """Rows, bytes and index entries of each table that a job names, as JSON types, with what its policies did.

        The bytes include those of the ids that are counted for it, whose number is `candidates`."""
        found: list[dict[str, Any]] = []
        for t, table in enumerate(self._tables):
            with self._locks[self._lock_of(t)]:
                figures = {"rows": table.num_rows, "bytes": table.size_bytes, "entries": table.index_entries}
                counts = {name: count for name, count in table.counts().items() if name != "skipped_rows"}
            if table.counts_for:
                (owner,) = (each for each in found if each["name"] == table.counts_for)
                owner |= {"candidates": figures["rows"], "bytes": owner["bytes"] + figures["bytes"]}
            else:
                found.append({"name": table.spec.name, **figures, **counts})
        return found

    def digests(self) -> dict[str, int]:
        """The digest of each table's rows, by name. The digests of all servers add up modulo 2**128."""
        found = {}
        for t, table in enumerate(self._tables):
            with self._locks[self._lock_of(t)]:
                found[table.spec.name] = table.digest()
        return found

    def _lock_of(self, t: int) -> int:
        return self._lock_T[t]


def _slots_of(t: int, sections: SectionIds, slots_V: Ints) -> Ints:
    """The slots of a table's rows; of rows that were left out, none."""
    first, end = sections.starts_S1[np.searchsorted(sections.tables_S, [t, t + 1])].tolist()
    slots_U: Ints = slots_V[first:end]
    return slots_U[slots_U >= 0]


def sum_of(dims_T: Ints, a: Gradients, b: Gradients) -> Gradients:
    """The sum of two pushes, row by row, as a + b."""
    rows = a.sections.ids_V.size + b.sections.ids_V.size
    count = a.sections.tables_S.size + b.sections.tables_S.size
    tables, starts = np.empty(count, dtype=np.int64), np.empty(count + 1, dtype=np.int64)
    ids, values = np.empty(rows, dtype=np.int64), np.empty(a.values.size + b.values.size, dtype=np.float32)
    squares_A, squares_B = a.squares_V, b.squares_V
    if squares_A.size or squares_B.size:
        squares_A, squares_B = _squares(dims_T, a), _squares(dims_T, b)
    squares = np.empty(squares_A.size + squares_B.size, dtype=np.float32)
    count = at.merge(
        dims_T,
        a.sections.tables_S, a.sections.starts_S1, a.sections.ids_V, a.values, squares_A,
        b.sections.tables_S, b.sections.starts_S1, b.sections.ids_V, b.values, squares_B,
        tables, starts, ids, values, squares,
    )  # fmt: skip
    tables, starts = tables[:count], starts[: count + 1]
    size = int((np.diff(starts) * dims_T[tables]).sum())
    return Gradients(SectionIds(tables, starts, ids[: starts[-1]]), values[:size], None, squares[: starts[-1]])


def _squares(dims_T: Ints, gradients: Gradients) -> Floats:
    """The mean squared gradient of each row (V,): the pushed one if there is one, else computed."""
    sections = gradients.sections
    if gradients.squares_V.size == sections.ids_V.size:
        return gradients.squares_V
    dims_V = np.repeat(dims_T[sections.tables_S], np.diff(sections.starts_S1))
    starts_V = np.cumsum(dims_V) - dims_V
    return (np.add.reduceat(gradients.values**2, starts_V) / dims_V).astype(np.float32)
