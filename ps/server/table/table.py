"""Table: the storage of one embedding table's rows on one server. Knows no message, no lock and no other server.

Pulls and updates of all tables, which also create rows, are in ps/server/tables.py.
"""
# U = unique ids, N = all rows, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkeep.base.arrays import Ids, Rows, UInt32s
from shardkeep.base.contiguous import for_kernels
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.table import index_kernels, row_kernels, table_kernels
from shardkeep.ps.server.table.changed_rows import ChangedBits
from shardkeep.ps.server.table.descriptor_kernels import DESCRIPTOR_DTYPE, Descriptors
from shardkeep.ps.server.table.index import RowIndex
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.ps.server.table.layout import COUNTERS, FIRST_WEIGHT, RowLayout
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.pre_images import PreImages
from shardkeep.ps.server.table.records import Records
from shardkeep.ps.server.table.stored_rows import NO_COUNTERS, ONE_PUSH, StoredRows

PACKED_KERNELS = "shardkeep.ps.server.table.packed_kernels"
"""The kernels of tables with values of fewer than 32 bits; imported by them alone."""


_POLICY_UPDATE_KERNELS = "shardkeep.ps.server.table.policies.policy_update_kernels"
"""The kernels of tables with policies; imported by them alone."""
_ENOUGH = 64
"""Removed rows whose memory is worth a call."""


class Table:
    """Rows and optimizer slots of one table, in the precision of its spec. Not thread safe.

    Ids are int64, sorted ascending and unique in every call; the caller has checked that. A row is created when its id
    receives its first gradient. Before that, its value is computed from the id.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        seed: int,
        descriptors: Descriptors | None = None,
        buckets: tuple[int, int] = (0, BUCKETS),
        counts_for: str = "",
    ) -> None:
        """`descriptors`: what kernels know of the table, one element of an array for many; None = one of its own.
        `buckets`: [first, end) of the ids that come. `counts_for`: the table whose ids without a row this one counts;
        its own rows have neither weights nor slots."""
        self.spec = spec
        self.skipped_rows = 0
        self.counts_for = counts_for
        self.layout = RowLayout.of(spec, counts=bool(counts_for))
        self._initial = Initial(spec.init, seed=seed, name=spec.name)
        self.descriptors = np.zeros(1, dtype=DESCRIPTOR_DTYPE) if descriptors is None else descriptors
        """`descriptor` in an array: numba takes 15 us to look at a record, and 0.4 to look at an array."""
        self.descriptor = self.descriptors[0]
        self.records = Records(self.layout.width, self.descriptor["blocks"])
        """The rows by slot. Read only, and only below `num_rows`."""
        self.index = RowIndex(self.records, self.descriptor, buckets)
        """Where the row of an id is."""
        self.descriptor["dim"], self.descriptor["start"] = self.layout.dim, self._initial.start
        self.descriptor["optimizer"]["slot_value"] = spec.optimizer.initial_slot
        self.descriptor["optimizer"]["code"] = _code_address(OPTIMIZERS[spec.optimizer.name].load())
        policies = self.descriptor["policies"]
        policies["counters"] = self.layout.first_counter if self.layout.num_counters else 0
        if self.layout.precision:
            self._describe_packed()
        if spec.admit is not None or spec.evict is not None:
            policies["update"] = _code_address(importlib.import_module(_POLICY_UPDATE_KERNELS).update)
        self.changed = ChangedBits(self.descriptor, self.records)
        self.pre_images: PreImages | None = None
        """What a snapshot keeps of the rows; None = none is taken."""

    @property
    def num_rows(self) -> int:
        return len(self.index)

    def counts(self) -> dict[str, int]:
        """What a snapshot remembers of the past: rows of pushes that were skipped, and what the policies did."""
        names = ["admitted_rows", "refused_rows"] if self.spec.admit is not None else []
        names += ["evicted_rows"] if self.spec.evict is not None else []
        done = self.descriptor["policies"]
        return {"skipped_rows": self.skipped_rows} | {name: int(done[name]) for name in names}

    def continue_counts(self, counts: Mapping[str, int]) -> None:
        """Takes over what a snapshot remembers."""
        self.skipped_rows = counts["skipped_rows"]
        for name in self.counts().keys() - {"skipped_rows"}:
            self.descriptor["policies"][name] = counts[name]

    @property
    def size_bytes(self) -> int:
        """Bytes set aside for rows, slots, ids and index."""
        return self.records.size_bytes(self.num_rows) + self.index.size_bytes

    def make_room(self, rows: int) -> None:
        """Makes room for `rows` new rows. Call it before kernels add rows through `descriptor`."""
        if rows and self.num_rows + rows > self.descriptor["index"]["room"]:
            self.index.make_room(rows)
            self.changed.make_room()

    def make_pre_image_room(self, rows: int) -> None:
        """Makes room for pre-images of `rows` rows, if a snapshot keeps any. Call it before kernels change rows."""
        if self.pre_images is not None:
            self.pre_images.make_room(rows)

    def _describe_packed(self) -> None:
        kernels = importlib.import_module(PACKED_KERNELS)
        layout, packed = self.layout, self.descriptor["packed"]
        packed["pull"] = _code_address(kernels.pull) if layout.rows != "fp32" else 0
        packed["update"], packed["mark"] = _code_address(kernels.update), layout.mark
        packed["precision"], packed["num_slots"] = layout.precision, layout.num_slots

    def remove(self, slots_U: Ids) -> None:
        """Removes the rows in slots. Other rows move to their slots."""
        from shardkeep.ps.server.table.policies import policy_kernels  # tables without policies do not load them

        if not slots_U.size:
            return
        self.make_pre_image_room(2 * slots_U.size)
        if self.changed:
            ids_U = np.empty(slots_U.size, dtype=np.int64)
            policy_kernels.ids_of(self.descriptors, slots_U, ids_U)
            self.changed.note_removed(ids_U)
        policy_kernels.remove_from(self.descriptors, slots_U)
        self.give_back()

    def give_back(self) -> None:
        """Returns memory that the table needs no more, once enough rows were removed."""
        policies = self.descriptor["policies"]
        if policies["removed"] < _ENOUGH:
            return
        self.index.shrink(int(policies["removed"]))
        policies["removed"] = 0
        self.records.give_back(self.num_rows)

    def digest(self) -> int:
        """128 bits that depend on every id, weight and slot, on the seed and the table's name, not on any order.

        Digests of the parts of a table on several servers add up modulo 2**128 to the whole table's."""
        low, high = row_kernels.digest(self.descriptor)
        return int(low) | int(high) << 64

    def load(self, ids: Ids, rows: Rows, slots: Rows | None = None, counters: UInt32s = NO_COUNTERS) -> None:
        """Sets weights (N, D) and optimizer slots (N, S) of unique ids (N), adding what is absent. Rounds them to the
        nearest value of the table's precision.

        `slots`: None = as they are, and those of a new row in new ones. `counters` (N, 2): of tables from which rows
        go; empty = one push at step 0."""
        where_N = self.slots_to_load(for_kernels(ids, np.int64))
        rows_ND = for_kernels(rows, np.float32).reshape(ids.size, self.layout.dim)
        slots_NS = np.empty((ids.size, 0), dtype=np.float32)
        if slots is not None:
            slots_NS = for_kernels(slots, np.float32).reshape(ids.size, self.layout.num_slots)
        if self.layout.precision:
            importlib.import_module(PACKED_KERNELS).set_rows(self.descriptor, where_N, rows_ND, slots_NS)
        else:
            row_kernels.write_words(self.records.blocks, where_N, FIRST_WEIGHT, rows_ND)
            row_kernels.write_words(self.records.blocks, where_N, self.layout.first_slot, slots_NS)
        self._set_counters(where_N, counters)

    def load_stored(self, stored: StoredRows) -> None:
        """Sets rows that a table has stored, adding what is absent; bit for bit where both have the same precision."""
        if stored.of(self.layout):
            where_N = self.slots_to_load(for_kernels(stored.ids_N, np.int64), initial=False)
            rows_NW, slots_NW = stored.words(self.layout)
            for first, words_NW in ((FIRST_WEIGHT, rows_NW), (self.layout.first_slot, slots_NW)):
                row_kernels.write_words(self.records.blocks, where_N, first, for_kernels(words_NW, np.float32))
            self._set_counters(where_N, stored.counters_N2)
        else:
            self.load(stored.ids_N, stored.rows(), stored.slots(), stored.counters_N2)

    def _set_counters(self, slots_N: Ids, counters_N2: UInt32s) -> None:
        if not self.layout.num_counters:
            return
        if not counters_N2.size:
            counters_N2 = np.full((slots_N.size, COUNTERS), (0, ONE_PUSH), dtype=np.uint32)
        words_N2 = for_kernels(counters_N2, np.uint32).view(np.float32)
        row_kernels.write_words(self.records.blocks, slots_N, self.layout.first_counter, words_N2)

    def slots_to_load(self, ids_U: Ids, *, initial: bool = True) -> Ids:
        """Slots of unique ids. Absent rows are created, with their initial values as `add_rows` says if `initial`."""
        self.index.make_room_for(ids_U)
        self.changed.make_room()
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        if initial:
            table_kernels.add_rows(self.descriptor, ids_U, slots_U, False)
        else:
            index_kernels.find_or_add(self.descriptor, ids_U, slots_U)
        return slots_U


@functools.cache
def _code_address(kernel: Any) -> int:
    """The address of the machine code of a kernel, for kernels that are compiled without it."""
    (compiled,) = kernel.overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
