"""Table: one embedding table's rows on one server. Knows no message, no lock and no other server."""
# U = unique ids, N = all rows, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.ps.config import TableSpec
from shardkeep.ps.shard import kernels
from shardkeep.ps.shard.index import RowIndex
from shardkeep.ps.shard.initial import Initial
from shardkeep.ps.shard.optimizers import OPTIMIZERS, step_scalars
from shardkeep.ps.shard.records import Records

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


class Table:
    """Rows and optimizer slots of one table, float32. Not thread safe.

    Ids are int64, sorted ascending and unique in every call; the caller has checked that. A row exists from the
    first gradient applied to it; before that its value is computed from its id.
    """

    def __init__(self, spec: TableSpec, *, seed: int) -> None:
        self.spec = spec
        self.skipped_rows = 0
        self._optimizer = OPTIMIZERS[spec.optimizer.name]
        self._num_slots = self._optimizer.num_slots(spec.dim)
        self._initial = Initial(spec.init, seed=seed, name=spec.name)
        self._used = kernels.FIRST_WEIGHT + spec.dim + self._num_slots
        self._records = Records(self._used + self._used % 2)
        self._index = RowIndex(self._records)

    @property
    def num_rows(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """Bytes set aside for rows, slots, ids and index."""
        return self._records.size_bytes + self._index.size_bytes

    def pull(self, ids_U: Ids) -> Rows:
        """Weights of ids as a fresh float32 (U, D); the initial value of unknown ones. Never changes the table."""
        ids_U = _plain(ids_U, np.int64)
        rows_UD = np.empty((ids_U.size, self.spec.dim), dtype=np.float32)
        initial = self._initial
        kernels.gather(ids_U, self._index.find(ids_U), *self._place, initial.key, initial.law, initial.scale, rows_UD)
        return rows_UD

    def apply(self, ids_U: Ids, grad_UD: Rows, *, step: int) -> None:
        """One optimizer update per id. Rows with inf or nan in their gradient are left alone and counted."""
        ids_U, grad_UD = self._finite(_plain(ids_U, np.int64), self._shaped(grad_UD, ids_U.size))
        slots_U = self._find_or_create(ids_U)
        self._optimizer.kernel(*self._place, slots_U, grad_UD, step_scalars(self.spec.optimizer, step))

    def apply_sum(self, parts: Sequence[tuple[Ids, Rows]], *, step: int) -> None:
        """Adds the gradients of several (ids, gradients), row by row in the order of `parts`, then one `apply`."""
        if not parts:
            return
        ids_U, grad_UD = parts[0]
        for ids_V, grad_VD in parts[1:]:
            ids_U, grad_UD = self._merged(ids_U, grad_UD, ids_V, grad_VD)
        self.apply(ids_U, grad_UD, step=step)

    def digest(self) -> int:
        """128 bits that depend on every id, weight and slot, on the seed and the table's name, not on any order.

        Digests of the parts of a table on several servers add up modulo 2**128 to the whole table's."""
        low, high = kernels.digest(*self._place, self.num_rows, self._used, self._initial.key)
        return int(low) | int(high) << 64

    def export(self) -> tuple[Ids, Rows, Rows]:
        """Copies of all ids (N), weights (N, D) and optimizer slots (N, S), sorted by id."""
        ids_N = self._records.ids(self.num_rows)
        order_N = np.argsort(ids_N, kind="stable")
        rows_ND = np.empty((ids_N.size, self.spec.dim), dtype=np.float32)
        slots_NS = np.empty((ids_N.size, self._num_slots), dtype=np.float32)
        kernels.read_words(*self._place, order_N, kernels.FIRST_WEIGHT, rows_ND)
        kernels.read_words(*self._place, order_N, kernels.FIRST_WEIGHT + self.spec.dim, slots_NS)
        return ids_N[order_N], rows_ND, slots_NS

    def load(self, ids: Ids, rows: Rows, slots: Rows) -> None:
        """Sets weights (N, D) and optimizer slots (N, S) of unique ids (N), adding what is absent."""
        where_N = self._find_or_create(_plain(ids, np.int64))
        kernels.write_words(*self._place, where_N, kernels.FIRST_WEIGHT, self._shaped(rows, ids.size))
        slots_NS = _plain(slots, np.float32).reshape(ids.size, self._num_slots)
        kernels.write_words(*self._place, where_N, kernels.FIRST_WEIGHT + self.spec.dim, slots_NS)

    @property
    def _place(self) -> tuple[npt.NDArray[np.int64], int, int]:
        return self._records.addresses, self._records.shift, self._records.width

    def _find_or_create(self, ids_U: Ids) -> Ids:
        before = self.num_rows
        slots_U = self._index.find_or_add(ids_U)
        if self.num_rows > before:
            law = (self._initial.key, self._initial.law, self._initial.scale)
            slot = np.float32(self._optimizer.initial_slot(self.spec.optimizer))
            kernels.initialise(ids_U, slots_U, before, *self._place, *law, self.spec.dim, slot)
        return slots_U

    def _finite(self, ids_U: Ids, grad_UD: Rows) -> tuple[Ids, Rows]:
        finite_U = np.empty(ids_U.size, dtype=np.bool_)
        good = kernels.finite_rows(grad_UD, finite_U)
        if good == ids_U.size:
            return ids_U, grad_UD
        self.skipped_rows += ids_U.size - good
        return ids_U[finite_U], grad_UD[finite_U]

    def _merged(self, ids_U: Ids, grad_UD: Rows, ids_V: Ids, grad_VD: Rows) -> tuple[Ids, Rows]:
        grad_UD, grad_VD = self._shaped(grad_UD, ids_U.size), self._shaped(grad_VD, ids_V.size)
        ids = np.empty(ids_U.size + ids_V.size, dtype=np.int64)
        grads = np.empty((ids.size, self.spec.dim), dtype=np.float32)
        first, second = _plain(ids_U, np.int64), _plain(ids_V, np.int64)
        count = kernels.merge_sum(first, grad_UD, second, grad_VD, ids, grads)
        return ids[:count], grads[:count]

    def _shaped(self, rows: Rows, count: int) -> Rows:
        return _plain(rows, np.float32).reshape(count, self.spec.dim)


def _plain(array: npt.NDArray[T], dtype: type[T]) -> npt.NDArray[T]:
    """The array itself where kernels can take it, else a copy: contiguous, aligned, writable."""
    if array.flags.carray and array.dtype == dtype:
        return array
    return np.require(array, dtype=dtype, requirements=["C", "A", "W"])
