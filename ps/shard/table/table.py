"""Table: one embedding table's rows on one server. Knows no message, no lock and no other server."""
# U = unique ids, N = all rows, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import for_kernels
from shardkeep.ps.config import TableSpec
from shardkeep.ps.shard.table import row_kernels as kernels
from shardkeep.ps.shard.table import table_kernels as at
from shardkeep.ps.shard.table.index import RowIndex
from shardkeep.ps.shard.table.index_kernels import FIRST_WEIGHT
from shardkeep.ps.shard.table.initializers import Initial
from shardkeep.ps.shard.table.optimizers.registry import OPTIMIZERS, code_address
from shardkeep.ps.shard.table.records import Records

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]
_ONE_TABLE = np.zeros(1, dtype=np.int64)
NO_SQUARES: Rows = np.empty(0, dtype=np.float32)
"""No second moment beside the gradients."""


class Table:
    """Rows and optimizer slots of one table, float32. Not thread safe.

    Ids are int64, sorted ascending and unique in every call; the caller has checked that. A row exists from the
    first gradient applied to it; before that its value is computed from its id.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        seed: int,
        place: Ids | None = None,
        scale: Rows | None = None,
    ) -> None:
        """`place` (int64, COLUMNS) and `scale` (float32, 2): where the table keeps what kernels must know of it, so
        that many tables' stand in one array; left out = of its own."""
        self.spec = spec
        self.skipped_rows = 0
        self._optimizer = OPTIMIZERS[spec.optimizer.name]
        self._num_slots = self._optimizer.num_slots(spec.dim)
        self._initial = Initial(spec.init, seed=seed, name=spec.name)
        self._used = FIRST_WEIGHT + spec.dim + self._num_slots
        self._records = Records(self._used + self._used % 2)
        self._index = RowIndex(self._records)
        self.place = np.zeros(at.COLUMNS, dtype=np.int64) if place is None else place
        self.scale = np.zeros(2, dtype=np.float32) if scale is None else scale
        self.scale[:] = self._initial.scale, self._optimizer.initial_slot(spec.optimizer)
        self.place[at.SHIFT], self.place[at.WIDTH] = self._records.shift, self._records.width
        self.place[at.DIM], self.place[at.LAW] = spec.dim, self._initial.law
        self.place[at.KEY] = self._initial.key.astype(np.int64)
        self.place[at.OPTIMIZER] = code_address(spec.optimizer.name)
        self._changed = np.zeros(0, dtype=np.uint8)  # by slot; without room for any = not noted
        self._find_place()

    @property
    def num_rows(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """Bytes set aside for rows, slots, ids and index."""
        return self._records.size_bytes + self._index.size_bytes

    def make_room(self, rows: int) -> None:
        """Makes room for so many new rows. Must come before kernels add rows through `place`."""
        self._index.make_room(rows)
        self._find_place()
        if self._changed.size and 8 * self._changed.size < self._records.capacity:
            more = np.zeros(max(self._bytes_of_bits(), 2 * self._changed.size), dtype=np.uint8)
            more[: self._changed.size] = self._changed
            self._set_changed(more)

    def added(self) -> None:
        """Kernels have added rows through `place`."""
        self._index.added(int(self.place[at.COUNT]))

    def _find_place(self) -> None:
        index, records = self._index, self._records
        for column, array in ((at.ENTRIES, index.entries), (at.OLD, index.old), (at.ADDRESSES, records.addresses)):
            self.place[column] = array.__array_interface__["data"][0]
            self.place[column + 1] = array.size
        self.place[at.COUNT], self.place[at.ROOM] = len(index), index.room

    @property
    def notes_changes(self) -> bool:
        """Whether a bit is set for each row that changes."""
        return bool(self._changed.size)

    def note_changes(self) -> Bits:
        """Starts noting which rows change, with no bit set; the bits until now, those of 8 slots a byte, which are the
        caller's (none where changes were not noted)."""
        before = self._changed
        self._set_changed(np.zeros(max(1, self._bytes_of_bits()), dtype=np.uint8))
        return before

    def add_changes(self, bits: Bits) -> None:
        """Sets bits that an earlier `note_changes` gave."""
        self._changed[: bits.size] |= bits

    def _bytes_of_bits(self) -> int:
        return -(-self._records.capacity // 8)

    def _set_changed(self, bits: Bits) -> None:
        self._changed = bits
        self.place[at.CHANGED], self.place[at.NUM_CHANGED] = bits.ctypes.data, bits.size

    def digest(self) -> int:
        """128 bits that depend on every id, weight and slot, on the seed and the table's name, not on any order.

        Digests of the parts of a table on several servers add up modulo 2**128 to the whole table's."""
        low, high = kernels.digest(*self._records_at, self.num_rows, self._used, self._initial.key)
        return int(low) | int(high) << 64

    @property
    def records(self) -> Records:
        """Where the rows stand, by slot. To be read only, and no further than `num_rows`."""
        return self._records

    @property
    def num_slots(self) -> int:
        """Optimizer slots of a row."""
        return self._num_slots

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's id, weights and slots."""
        return 4 * self._used

    def load(self, ids: Ids, rows: Rows, slots: Rows) -> None:
        """Sets weights (N, D) and optimizer slots (N, S) of unique ids (N), adding what is absent."""
        where_N = self.find_or_create(for_kernels(ids, np.int64))
        kernels.write_words(*self._records_at, where_N, FIRST_WEIGHT, self._shaped(rows, ids.size))
        slots_NS = for_kernels(slots, np.float32).reshape(ids.size, self._num_slots)
        kernels.write_words(*self._records_at, where_N, FIRST_WEIGHT + self.spec.dim, slots_NS)

    @property
    def _records_at(self) -> tuple[npt.NDArray[np.int64], int, int]:
        return self._records.addresses, self._records.shift, self._records.width

    def finite(self, ids_U: Ids, grad_UD: Rows) -> tuple[Ids, Rows]:
        """Without the rows whose gradient is not finite, which are counted."""
        finite_U = np.empty(ids_U.size, dtype=np.bool_)
        good = kernels.finite_rows(grad_UD, finite_U)
        if good == ids_U.size:
            return ids_U, grad_UD
        self.skipped_rows += ids_U.size - good
        return ids_U[finite_U], grad_UD[finite_U]

    def find_or_create(self, ids_U: Ids) -> Ids:
        """Slots of unique ids. Absent rows are created with their initial values."""
        self.make_room(ids_U.size)
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        at.add_rows(self.place, self.scale, ids_U, slots_U, False)
        self.added()
        return slots_U

    def _shaped(self, rows: Rows, count: int) -> Rows:
        return for_kernels(rows, np.float32).reshape(count, self.spec.dim)
