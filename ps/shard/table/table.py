"""Table: the storage of one embedding table's rows on one server. Knows no message, no lock and no other server.

Pulls and updates of all tables, which also create rows, are in ps/shard/tables.py.
"""
# U = unique ids, N = all rows, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import importlib

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Ids, Rows, UInt32s
from shardkeep.base.contiguous import for_kernels
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.table import row_kernels as kernels
from shardkeep.ps.shard.table import table_kernels as at
from shardkeep.ps.shard.table.changed_rows import ChangedBits
from shardkeep.ps.shard.table.index import RowIndex
from shardkeep.ps.shard.table.index_kernels import FIRST
from shardkeep.ps.shard.table.initializers import Initial
from shardkeep.ps.shard.table.layout import COUNTERS, RowLayout
from shardkeep.ps.shard.table.optimizers.registry import OPTIMIZERS, code_address
from shardkeep.ps.shard.table.pre_image_kernels import NO_IMAGES
from shardkeep.ps.shard.table.records import Records
from shardkeep.ps.shard.table.stored_rows import NO_COUNTERS, ONE_PUSH, StoredRows

PACKED_KERNELS = "shardkeep.ps.shard.table.packed_kernels"
"""The kernels of tables with values of fewer than 32 bits; imported by them alone."""
NO_SQUARES: Rows = np.empty(0, dtype=np.float32)
"""No second moment beside the gradients."""
NO_COUNTS: Ids = np.empty(0, dtype=np.int64)
"""No rows of buckets are counted."""


class _Count:
    """A number of a table that kernels change, as an attribute."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __get__(self, table: Table, _: type[Table]) -> int:
        return int(table.descriptor[self._column])

    def __set__(self, table: Table, count: int) -> None:
        table.descriptor[self._column] = count


class Table:
    """Rows and optimizer slots of one table, in the precision of its spec. Not thread safe.

    Ids are int64, sorted ascending and unique in every call; the caller has checked that. A row is created when its id
    receives its first gradient. Before that, its value is computed from the id.
    """

    admitted_rows = _Count(at.ADMITTED)
    """Ids that admission made rows."""
    refused_rows = _Count(at.REFUSED)
    """Rows of pushes that admission dropped."""
    evicted_rows = _Count(at.EVICTED)
    """Rows that went."""

    def __init__(
        self,
        spec: TableSpec,
        *,
        seed: int,
        descriptor: Ids | None = None,
        starts: Rows | None = None,
        buckets: tuple[int, int] = (0, BUCKETS),
        counts_for: str = "",
    ) -> None:
        """`descriptor` (int64, COLUMNS) and `starts` (float32, STARTS): data for kernels, as views of arrays
        for many tables; None = arrays of its own. `buckets`: [first, end) of the ids that come.
        `counts_for`: the table whose ids without a row this one counts; its own rows have neither weights nor slots."""
        self.spec = spec
        self.skipped_rows = 0
        optimizer = OPTIMIZERS[spec.optimizer.name]
        self.counts_for = counts_for
        self.layout = RowLayout.of(spec, counts=bool(counts_for))
        self._initial = Initial(spec.init, seed=seed, name=spec.name)
        self.descriptor = np.zeros(at.COLUMNS, dtype=np.int64) if descriptor is None else descriptor
        self.starts = np.zeros(at.STARTS, dtype=np.float32) if starts is None else starts
        count = self.descriptor[at.COUNT : at.COUNT + 1]
        self.records = Records(self.layout.width, count)
        """The rows by slot. Read only, and only below `num_rows`."""
        self._index = RowIndex(self.records, count, buckets)
        initial_slot = optimizer.initial_slot(spec.optimizer)
        self.starts[:] = self._initial.first, self._initial.second, initial_slot
        self.descriptor[at.SHIFT], self.descriptor[at.WIDTH] = self.records.shift, self.records.width
        self.descriptor[at.DIM], self.descriptor[at.INITIALIZER] = self.layout.dim, self._initial.initializer
        self.descriptor[at.COUNTERS] = self.layout.first_counter if self.layout.num_counters else 0
        self.descriptor[at.KEY] = self._initial.key.astype(np.int64)
        self.descriptor[at.OPTIMIZER] = code_address(optimizer.kernels)
        if self.layout.precision:
            self._describe_packed()
        self.changed = ChangedBits(self.descriptor, self.records)
        self._describe()

    @property
    def num_rows(self) -> int:
        return len(self._index)

    def counts(self) -> dict[str, int]:
        """What a snapshot remembers of the past: rows of pushes that were skipped, and what the policies did."""
        found = {"skipped_rows": self.skipped_rows}
        if self.spec.admit is not None:
            found |= {"admitted_rows": self.admitted_rows, "refused_rows": self.refused_rows}
        if self.spec.evict is not None:
            found["evicted_rows"] = self.evicted_rows
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes set aside for rows, slots, ids and index."""
        return self.records.size_bytes + self._index.size_bytes

    @property
    def index_entries(self) -> int:
        """Entries of the index, taken or not."""
        return self._index.entries.size - FIRST

    @property
    def buckets(self) -> tuple[int, int]:
        """Placement buckets [first, end) of the table's ids."""
        return self._index.buckets

    def hashes(self, first: int, end: int) -> tuple[int, int]:
        """The range of hashes of the ids of placement buckets [first, end)."""
        return self._index.hashes(first, end)

    def slots_between(self, first: int, end: int) -> Ids:
        """The slots of the rows whose hashes are in [first, end)."""
        return self._index.slots_between(first, end)

    def make_room(self, rows: int) -> None:
        """Makes room for `rows` new rows. Call it before kernels add rows through `descriptor`."""
        self._index.make_room(rows)
        self._room_made()

    def _room_made(self) -> None:
        self._describe()
        self.changed.make_room()

    def _describe(self) -> None:
        index, records = self._index, self.records
        for column, array in ((at.ENTRIES, index.entries), (at.OLD, index.old), (at.ADDRESSES, records.addresses)):
            self.descriptor[column] = array.__array_interface__["data"][0]
            self.descriptor[column + 1] = array.size
        self.descriptor[at.ROOM] = index.room

    def _describe_packed(self) -> None:
        if self.layout.rows != "fp32":
            self.descriptor[at.PACKED_PULL] = code_address(PACKED_KERNELS, "pull")
        self.descriptor[at.PACKED_UPDATE] = code_address(PACKED_KERNELS, "update")
        self.descriptor[at.MARK], self.descriptor[at.PRECISION] = self.layout.mark, self.layout.precision
        self.descriptor[at.NUM_SLOTS], self.descriptor[at.STARTS_AT] = self.layout.num_slots, self.starts.ctypes.data

    @property
    def key(self) -> np.uint64:
        """Of the table's random numbers."""
        return self._initial.key

    def ids_in(self, slots_U: Ids) -> Ids:
        """The ids of the rows in slots."""
        from shardkeep.ps.shard.table import policy_kernels

        ids_U = np.empty(slots_U.size, dtype=np.int64)
        policy_kernels.ids_of(self.descriptor, slots_U, ids_U)
        return ids_U

    def remove_ids(self, ids_N: Ids) -> None:
        """Removes the rows of ids that are there, while no snapshot is taken."""
        from shardkeep.ps.shard.table import policy_kernels  # tables without policies do not load them

        slots_N = np.empty(ids_N.size, dtype=np.int64)
        policy_kernels.find_rows(self.descriptor, for_kernels(ids_N, np.int64), slots_N)
        self.remove(NO_IMAGES, slots_N[slots_N >= 0])

    def remove(self, images: Ids, slots_U: Ids, counts_B: Ids = NO_COUNTS) -> None:
        """Removes the rows in slots. Other rows move to their slots.

        `images`: what pushes keep for a snapshot; it has room for two pre-images of each row. `counts_B`: as in
        `policy_kernels.remove_rows`."""
        from shardkeep.ps.shard.table import policy_kernels

        if not slots_U.size:
            return
        slots_U = np.sort(slots_U)[::-1].copy()
        self.changed.note_removed(lambda: self.ids_in(slots_U))
        policy_kernels.remove_rows(self.descriptor, images, slots_U, counts_B)
        self.give_back()

    def give_back(self) -> None:
        """Returns memory that the table needs no more, after rows were removed."""
        removed, self.descriptor[at.REMOVED] = int(self.descriptor[at.REMOVED]), 0
        if self._index.shrink(removed):
            self._describe()
        self.records.give_back(self.num_rows)

    def digest(self) -> int:
        """128 bits that depend on every id, weight and slot, on the seed and the table's name, not on any order.

        Digests of the parts of a table on several servers add up modulo 2**128 to the whole table's."""
        low, high = kernels.digest(*self._records_at, self.num_rows, self.layout.used, self._initial.key)
        return int(low) | int(high) << 64

    def load(self, ids: Ids, rows: Rows, slots: Rows, counters: UInt32s = NO_COUNTERS, *, clock: int = 0) -> None:
        """Sets weights (N, D) and optimizer slots (N, S) of unique ids (N), adding what is absent. Rounds them to the
        nearest value of the table's precision.

        `counters` (N, 2): of tables from which rows go; empty = one push at `clock`."""
        slots_NS = for_kernels(slots, np.float32).reshape(ids.size, self.layout.num_slots)
        where_N = self._set(ids, rows, slots_NS)
        if not self.layout.precision:
            kernels.write_words(*self._records_at, where_N, self.layout.first_slot, slots_NS)
        self._set_counters(where_N, counters, clock)

    def load_stored(self, stored: StoredRows, *, clock: int = 0) -> None:
        """Sets rows that a table has stored, adding what is absent; bit for bit where both have the same precision."""
        if stored.of(self.layout):
            where_N = self.slots_to_load(for_kernels(stored.ids_N, np.int64))
            rows_NW, slots_NW = stored.words(self.layout)
            kernels.write_words(*self._records_at, where_N, self.layout.first_weight, rows_NW)
            kernels.write_words(*self._records_at, where_N, self.layout.first_slot, slots_NW)
            self._set_counters(where_N, stored.counters_N2, clock)
        else:
            self.load(stored.ids_N, stored.rows(), stored.slots(), stored.counters_N2, clock=clock)

    def _set_counters(self, slots_N: Ids, counters_N2: UInt32s, clock: int) -> None:
        if not self.layout.num_counters:
            return
        from shardkeep.ps.shard.table import policy_kernels

        if not counters_N2.size:
            counters_N2 = np.empty((slots_N.size, COUNTERS), dtype=np.uint32)
            counters_N2[:] = clock, ONE_PUSH
        policy_kernels.write_counters(self.descriptor, slots_N, for_kernels(counters_N2, np.uint32))

    def fill(self, ids: Ids, rows: Rows) -> Ids:
        """Sets weights (N, D) of unique ids (N), adding what is absent. Rounds as `load`. Their last push is at step 0,
        where rows go. Returns where they are."""
        where_N = self._set(ids, rows, np.empty((ids.size, 0), dtype=np.float32))
        self._set_counters(where_N, NO_COUNTERS, 0)
        return where_N

    def _set(self, ids: Ids, rows: Rows, slots_NS: Rows) -> Ids:
        where_N, rows_ND = self.slots_to_load(for_kernels(ids, np.int64)), self._shaped(rows, ids.size)
        if self.layout.precision:
            importlib.import_module(PACKED_KERNELS).set_rows(self.descriptor, where_N, rows_ND, slots_NS)
        else:
            kernels.write_words(*self._records_at, where_N, self.layout.first_weight, rows_ND)
        return where_N

    @property
    def _records_at(self) -> tuple[npt.NDArray[np.int64], int, int]:
        return self.records.addresses, self.records.shift, self.records.width

    def finite(self, ids_U: Ids, grad_UD: Rows) -> tuple[Ids, Rows]:
        """The ids and gradients without rows whose gradient is not finite. Counts the omitted rows."""
        finite_U = np.empty(ids_U.size, dtype=np.bool_)
        good = kernels.finite_rows(grad_UD, finite_U)
        if good == ids_U.size:
            return ids_U, grad_UD
        self.skipped_rows += ids_U.size - good
        return ids_U[finite_U], grad_UD[finite_U]

    def slots_to_load(self, ids_U: Ids) -> Ids:
        """Slots of unique ids. Absent rows are created with their initial values, as `add_rows` says."""
        self._index.make_room_for(ids_U)
        self._room_made()
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        at.add_rows(self.descriptor, self.starts, ids_U, slots_U, False)
        return slots_U

    def _shaped(self, rows: Rows, count: int) -> Rows:
        return for_kernels(rows, np.float32).reshape(count, self.layout.dim)
