"""RowPool: a worker's bounded memory of hot rows, their unsent gradient and their cached values in one structure.

Decides which rows of a step are sent and keeps the rest back (error feedback). Numpy in, numpy out: knows no value
format, no server, no message. Nothing is dropped: what finds no room is sent.
"""
# T = tables of the group, V = a step's rows, K = sent rows, D = embedding dim, C = D + 1, S = slots

from __future__ import annotations

import math

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.compression.selection import row_cache_kernels as cache_kernels, row_pool_kernels as kernels
from shardkeep.compression.selection.selected import ExtraRows, Selected, StepRows
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slots import RowSlots, waiting


class RowPool:
    """`capacity` slots for rows of `num_tables` tables of one `dim`. Not thread safe.

    What it does is a function of its calls' arguments alone. Every step: `select`, encode the rows, `commit` what the
    receiver will decode; then in float64, at every step,

        sum(decoded) + sum(residuals) + lost == sum(gradients)

    up to float32 rounding of gradient + residual. Lost are only the rounding errors of sent rows that found no slot, or
    whose slot another row took: alone they are not worth their bytes. `lost_rows` and `lost_squares` count them.
    """

    def __init__(self, *, num_tables: int, dim: int, capacity: int, cache: bool, history: int) -> None:
        """`cache`: keep rows, too, 4 * (dim + 1) more bytes a slot. `history`: how many steps back `rewind` can go."""
        check_sizes(num_tables, dim, capacity, history)
        self.num_tables, self.dim = num_tables, dim
        self.slots = RowSlots(width=dim, capacity=capacity, history=history)
        self._rows_SC = np.empty((capacity if cache else 0, dim + 1), dtype=np.float32)  # the last is the speed
        self._extras = ExtraRows.of(0, dim)
        self.hits = 0
        """Rows that `lookup` found."""
        self.misses = 0

    # ---- gradients ----

    def select(
        self,
        step: int,
        starts_T1: Ints,
        ids_V: Ints,
        grad_VD: Floats,
        *,
        keep: float,
        flush: bool = False,
    ) -> Selected:
        """The rows to send in `step`; the others' gradients are kept back. Steps rise.

        Table t has the ids `starts[t]` up to `starts[t + 1]`, sorted and unique (so no row is in several parts). With
        A = gradient + residual, the `num_kept(V, keep)` rows with the largest |A|_2 over all tables are sent, of
        equal ones the first. Besides: with `flush` every other row in which a gradient waits, and not only
        a rounding error, and what finds no slot. Of a new row and the least of a few slots, the one with the lower norm
        is sent.

        A row that would not be finite is left out and its residual stays as it is.

        Raises ValueError for inputs of another form, ids out of order, a step that is not above the last one, or when
        the last selection was not committed."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, grad_VD)
        count = num_kept(ids_V.size, keep)
        self.slots.begin(step)
        flushed = waiting(self.slots) if flush else np.empty(0, dtype=np.int64)
        return self.slots.opened(self._selected(starts_T1, ids_V, grad_VD, count, flushed))

    def commit(self, selected: Selected, sent_KD: Floats) -> None:
        """Notes what the receiver will decode for the selected rows, float32 (K, D): the rest, rows - sent, becomes the
        residual, in the row's own slot; a row without one takes a free slot or that of a clean cached row, else its
        rounding error is lost. A row sent exactly frees its slot. A row that does not decode to finite values keeps no
        residual, and makes `lost_squares` infinite or NaN.

        Raises ValueError for another selection than the last one, or rows of another form."""
        self.slots.close(selected, sent_KD)
        kernels.commit(
            self.slots.pool,
            selected.starts_T1,
            selected.ids_K,
            selected.rows_KD,
            selected.scores_K,
            selected.slots_K,
            np.ascontiguousarray(sent_KD),
        )

    # ---- cached rows ----

    def lookup(
        self, step: int, starts_T1: Ints, ids_V: Ints, out_VD: Floats, lease: int, drift: float = math.inf
    ) -> Bools:
        """Copies the cached rows that were read at most `lease` steps before `step` into `out_VD`, float32 (V, D);
        returns which, bool (V,). Other rows of `out_VD` stay as they are. Ids as in `select`.

        A row that moves so much from reading to reading that it should differ by more than `drift` of its norm by now
        is not found either; one that was read once is good for a step."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, out_VD)
        self._check_cache()
        hit_V = np.empty(ids_V.size, dtype=np.bool_)
        hits = cache_kernels.lookup(self.slots.pool, self._rows_SC, step, lease, starts_T1, ids_V, out_VD, hit_V, drift)
        self.hits += hits
        self.misses += ids_V.size - hits
        return hit_V

    def store(self, step: int, starts_T1: Ints, ids_V: Ints, rows_VD: Floats, drift: float = math.inf) -> int:
        """Takes rows as a server gave them at `step`, over what is cached of them; returns how many found room.

        A new row takes a free slot, or among a few the first without a residual, not used since it was last looked at
        (second chance) and not read at this step."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, rows_VD)
        self._check_cache()
        self.slots.log.reserve(ids_V.size)
        return cache_kernels.store(self.slots.pool, self._rows_SC, step, starts_T1, ids_V, rows_VD, drift)

    def _selected(self, starts_T1: Ints, ids_V: Ints, grad_VD: Floats, count: int, flushed: Ints) -> Selected:
        """Decides what becomes of a step's rows, and copies those that are sent, each table's sorted by id."""
        pool = self.slots.pool
        self.slots.log.reserve(ids_V.size + flushed.size)
        rows, counts = StepRows.of(ids_V.size), np.empty(kernels.COUNTS, dtype=np.int64)
        if len(self._extras.heads) < ids_V.size + flushed.size:
            self._extras = ExtraRows.of(ids_V.size + flushed.size, self.dim)
        kernels.select(pool, starts_T1, ids_V, grad_VD, count, flushed, *rows, *self._extras, counts)
        num_extra, num_bad, num_overflow = counts.tolist()
        heads = self._extras.heads[:num_extra]
        order_E = np.lexsort((heads[:, kernels.EXTRA_ID], heads[:, kernels.EXTRA_TABLE]))
        size = num_extra + int(np.count_nonzero(rows.fates_V == kernels.SENT))
        out = Selected.empty(starts_T1.size, size, self.dim, num_overflow, num_bad)
        kernels.gather(
            pool, starts_T1, ids_V, grad_VD, *rows, *self._extras, order_E,
            out.starts_T1, out.ids_K, out.rows_KD, out.squares_K, out.scores_K, out.slots_K,
        )  # fmt: skip
        return out

    def _check_cache(self) -> None:
        if not len(self._rows_SC):
            raise ValueError("this pool keeps no rows; make it with cache=True")


def check_sizes(num_tables: int, dim: int, capacity: int, history: int) -> None:
    """Raises ValueError for sizes that no pool has."""
    if min(num_tables, dim, capacity) < 1 or history < 0:
        sizes = f"{num_tables} tables, dim {dim}, capacity {capacity}, history {history}"
        raise ValueError(f"{sizes}; allowed: 1 or more, history 0 or more")


def check_rows(num_tables: int, dim: int, starts_T1: Ints, ids_V: Ints, rows_VD: Floats) -> None:
    """Raises ValueError unless these are rows (V, D) of the tables' ids, each table's sorted and unique."""
    for name, array, dtype, shape in (
        ("ids", ids_V, np.int64, (ids_V.size,)),
        ("rows", rows_VD, np.float32, (ids_V.size, dim)),
        ("starts", starts_T1, np.int64, (num_tables + 1,)),
    ):
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(f"{name} of {array.dtype} {array.shape}; expected contiguous {dtype.__name__} {shape}")
    if starts_T1[0] != 0 or starts_T1[-1] != ids_V.size or (np.diff(starts_T1) < 0).any():
        raise ValueError(f"starts {starts_T1.tolist()} do not split {ids_V.size} ids")
    at = kernels.first_disorder(starts_T1, ids_V)
    if at >= 0:
        raise ValueError(f"id {ids_V[at]} at position {at} follows {ids_V[at - 1]}; ids are sorted and unique")
