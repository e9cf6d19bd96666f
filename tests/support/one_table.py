"""One table and one index without the kernels that serve many tables at once, and what a table holds."""

from __future__ import annotations

import ctypes

import numpy as np

from shardkeep.base.contiguous import for_kernels
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.table import index_kernels, table_kernels
from shardkeep.ps.server.table.descriptor_kernels import DESCRIPTOR_DTYPE
from shardkeep.ps.server.table.index import RowIndex
from shardkeep.ps.server.table.layout_kernels import FIRST_WEIGHT
from shardkeep.ps.server.table.optimizers.optimizer import RowUpdate
from shardkeep.ps.server.table.records import Records
from shardkeep.ps.server.table.stored_rows import StoredRows
from shardkeep.ps.server.table.table import Table


class OneIndex(RowIndex):
    def __init__(self, width: int = 2, buckets: tuple[int, int] = (0, BUCKETS)) -> None:
        self.descriptor = np.zeros(1, dtype=DESCRIPTOR_DTYPE)[0]
        super().__init__(Records(width, self.descriptor["blocks"]), self.descriptor, buckets)

    @property
    def moving(self) -> bool:
        """Whether entries move into a larger array."""
        return self.old.size > index_kernels.FIRST

    def find(self, ids_U: np.ndarray) -> np.ndarray:
        """Slots of ids, int64; -1 where an id is absent. Changes nothing."""
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        index_kernels.find(self.descriptor, ids_U, slots_U)
        return slots_U

    def find_or_add(self, ids_U: np.ndarray) -> np.ndarray:
        """Slots of unique ids, int64; absent ones are added and get the slots from len(self) on."""
        self.make_room(ids_U.size)
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        index_kernels.find_or_add(self.descriptor, ids_U, slots_U)
        return slots_U

    def remove(self, slot: int) -> None:
        index_kernels.remove(self.descriptor, slot)
        self.shrink(1)


class OneTable(Table):
    def apply(self, ids_U: np.ndarray, grad_UD: np.ndarray, *, step: int) -> None:
        applied(self, ids_U, grad_UD, step=step)

    def pull(self, ids_U: np.ndarray) -> np.ndarray:
        return pulled(self, ids_U)


def scalars_of(table: Table, step: int) -> np.ndarray:
    return np.array(table.spec.optimizer.scalars(RowUpdate(step)), dtype=np.float32)


def applied(table: Table, ids_U: np.ndarray, grad_UD: np.ndarray, *, step: int) -> None:
    """One optimizer update per id. Rows with inf or nan in their gradient are left alone and counted."""
    shaped_UD = for_kernels(grad_UD, np.float32).reshape(ids_U.size, table.spec.dim)
    finite_U = np.isfinite(shaped_UD).all(axis=1)
    table.skipped_rows += int((~finite_U).sum())
    ids_U, grad_UD = for_kernels(ids_U, np.int64)[finite_U], shaped_UD[finite_U]
    slots_U, scalars = table.slots_to_load(ids_U), scalars_of(table, step)
    table_kernels.update(table.descriptor, slots_U, grad_UD, scalars)


def pulled(table: Table, ids_U: np.ndarray) -> np.ndarray:
    """Weights of ids as a fresh float32 (U, D); the initial value of unknown ones. Never changes the table."""
    ids_U = for_kernels(ids_U, np.int64)
    rows_UD, slots_U = np.empty((ids_U.size, table.spec.dim), np.float32), np.empty(ids_U.size, np.int64)
    starts, flat = np.array([0, ids_U.size]), rows_UD.reshape(-1)
    tables = np.array([table.descriptor])
    table_kernels.pull(tables, np.zeros(1, np.int64), starts, ids_U, slots_U, np.empty(1, np.int64), flat)
    return rows_UD


def records_of(records: Records, count: int) -> np.ndarray:
    """A copy of the first `count` records, float32 (count, width), in the order of their slots."""
    words = records.width << records.shift
    blocks = [(ctypes.c_float * words).from_address(int(address)) for address in records.addresses if address]
    return np.array([*map(np.array, blocks)], np.float32).reshape(-1, records.width)[:count]


def ids_in(records: Records, count: int) -> np.ndarray:
    """Ids of the first `count` records, in the order of their slots."""
    return records_of(records, count)[:, :2].copy().view(np.int64).reshape(-1)


def exported(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of all ids (N), weights (N, D) and optimizer slots (N, S), sorted by id, as float32."""
    ids_N = ids_in(table.records, table.num_rows)
    order_N = np.argsort(ids_N, kind="stable")
    stored = stored_rows(table).taken(order_N)
    return stored.ids_N, stored.rows().copy(), stored.slots().copy()


def stored_rows(table: Table) -> StoredRows:
    """All rows in the table's precision, in the order of their slots."""
    layout, used_NW = table.layout, records_of(table.records, table.num_rows)
    rows_NW = used_NW[:, FIRST_WEIGHT : layout.first_slot]
    slots_NW = used_NW[:, layout.first_slot : layout.first_slot + layout.slot_words]
    return StoredRows.of_words(ids_in(table.records, table.num_rows), rows_NW, slots_NW, layout)
