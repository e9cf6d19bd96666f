"""RowPool: a worker's bounded memory of hot rows, their unsent gradient and their cached values in one structure.

Decides which rows of a step are sent and keeps the rest back (error feedback). Numpy in, numpy out: knows no value
format, no server, no message. Nothing is dropped: what finds no room is sent.
"""
# T = tables of the group, V = a step's rows, K = sent rows, D = embedding dim, C = D + 1, S = slots

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.compression.selection import row_cache_kernels as cache_kernels
from shardkeep.compression.selection import row_pool_kernels as kernels
from shardkeep.compression.selection import row_pool_state
from shardkeep.compression.selection.selected import ExtraRows, Selected, StepRows
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.selection.slot_kernels import LOST_ROWS
from shardkeep.compression.selection.slots import RowSlots

_NO_MARKS = np.empty(0, dtype=np.uint8)
_NO_INTS = np.empty(0, dtype=np.int64)


class RowPool:
    """`capacity` slots for rows of `num_tables` tables of one `dim`. Not thread safe.

    What it does is a function of its calls' arguments alone. Every step: `select`, encode the rows, `commit` what the
    receiver will decode; then in float64, at every step,

        sum(decoded) + sum(residuals) + lost == sum(gradients)

    up to float32 rounding of gradient + residual. Lost are only the rounding errors of sent rows that found no slot, or
    whose slot another row took: alone they are not worth their bytes. `lost_rows` and `lost_squares` count them.
    """

    def __init__(
        self,
        *,
        num_tables: int,
        dim: int,
        capacity: int,
        cache: bool,
        history: int,
    ) -> None:
        """`cache`: keep rows, too, 4 * (dim + 1) more bytes a slot. `history`: how many steps back `rewind` can go."""
        if min(num_tables, dim, capacity) < 1 or history < 0:
            given = f"{num_tables} tables, dim {dim}, capacity {capacity}, history {history}"
            raise ValueError(f"{given}; allowed: 1 or more, history 0 or more")
        self.num_tables, self.dim, self.capacity = num_tables, dim, capacity
        num_sums = kernels.MASS + kernels.AGES
        self._slots = RowSlots(width=dim, capacity=capacity, history=history, num_sums=num_sums)
        self._rows_SC = np.empty((capacity if cache else 0, dim + 1), dtype=np.float32)  # the last is the speed
        self._extras = ExtraRows.of(0, dim)
        self._open: Selected | None = None
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
        max_age: int = 0,
        chosen_V: Bools | None = None,
    ) -> Selected:
        """The rows to send in `step`; the others' gradients are kept back. Steps rise.

        Table t has the ids `starts[t]` up to `starts[t + 1]`, sorted and unique (so no row is in several parts). With
        A = gradient + residual, the `num_kept(V, keep)` rows with the largest |A|_2 over all tables are sent, of
        equal ones the first. `chosen_V` names the rows instead. Besides: every row, of this step or not,
        whose oldest unsent gradient came `max_age` > 0 or more steps ago (a rounding error has no age), and what finds
        no slot. Of a new row and the least of a few slots, the one with the lower norm is sent.

        A row that would not be finite is left out and its residual stays as it is.

        Raises ValueError for inputs of another form, ids out of order, a step that is not above the last one, or when
        the last selection was not committed."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, grad_VD)
        if chosen_V is not None and chosen_V.shape != ids_V.shape:
            raise ValueError(f"chosen of {chosen_V.shape}; expected {ids_V.shape}")
        count = num_kept(ids_V.size, keep)
        self._check_closed()
        self._slots.begin(step)
        due = step - max_age if max_age > 0 else -1
        aged = self._aged(due) if due >= 0 else _NO_INTS
        marks = _NO_MARKS if chosen_V is None else np.ascontiguousarray(chosen_V, dtype=np.uint8)
        return self._select(step, starts_T1, ids_V, grad_VD, count, marks, due, aged)

    def commit(self, selected: Selected, sent_KD: Floats) -> None:
        """Notes what the receiver will decode for the selected rows, float32 (K, D): the rest, rows - sent, becomes the
        residual, in the row's own slot; a row without one takes a free slot or that of a clean cached row, else its
        rounding error is lost. A row sent exactly frees its slot. A row that does not decode to finite values keeps no
        residual, and makes `lost_squares` infinite or NaN.

        Raises ValueError for another selection than the last one, or rows of another form."""
        if selected is not self._open:
            raise ValueError("only the last selection can be committed, once")
        if sent_KD.shape != selected.rows_KD.shape or sent_KD.dtype != np.float32:
            raise ValueError(f"sent rows of {sent_KD.dtype} {sent_KD.shape}; expected float32 {selected.rows_KD.shape}")
        self._slots.reserve(selected.ids_K.size)
        kernels.commit(
            self._slots.pool,
            selected.starts_T1,
            selected.ids_K,
            selected.rows_KD,
            selected.scores_K,
            selected.slots_K,
            selected.ages_K,
            np.ascontiguousarray(sent_KD),
        )
        self._open = None

    def rewind(self, step: int) -> None:
        """Back to the content at the start of `step`, totals included, an open selection forgotten; the same calls then
        give the same bits. All cached rows are forgotten.

        Raises KeyError when `step` is not one of the last `history` steps."""
        self._slots.rewind(step)
        self._open = None

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
        hits = cache_kernels.lookup(
            self._slots.pool, self._rows_SC, step, lease, starts_T1, ids_V, out_VD, hit_V, drift
        )
        self.hits += hits
        self.misses += ids_V.size - hits
        return hit_V

    def store(self, step: int, starts_T1: Ints, ids_V: Ints, rows_VD: Floats, drift: float = math.inf) -> int:
        """Takes rows as a server gave them at `step`, over what is cached of them; returns how many found room.

        A new row takes a free slot, or among a few the first without a residual, not used since it was last looked at
        (second chance) and not read at this step."""
        check_rows(self.num_tables, self.dim, starts_T1, ids_V, rows_VD)
        self._check_cache()
        self._slots.reserve(ids_V.size)
        return cache_kernels.store(self._slots.pool, self._rows_SC, step, starts_T1, ids_V, rows_VD, drift)

    def forget_rows(self) -> None:
        """Forgets all cached rows; residuals stay."""
        self._slots.forget_rows()

    # ---- what is here ----

    @property
    def num_unsent(self) -> int:
        """Rows with a residual, rounding errors included."""
        return self._slots.num_unsent

    @property
    def unsent_norm(self) -> float:
        """L2 norm of all residuals together, summed in float64."""
        return float(np.sqrt((self._slots.rests_SW[self._slots.unsent()].astype(np.float64) ** 2).sum()))

    @property
    def lost_rows(self) -> int:
        """Rows whose rounding error was given up."""
        return int(self._slots.control[LOST_ROWS])

    @property
    def lost_squares(self) -> float:
        """Sum of squares of what was given up."""
        return float(self._slots.sums[kernels.LOST_SQUARES])

    @property
    def delivered_by_age(self) -> npt.NDArray[np.float64]:
        """Sum of the L2 norms of delivered rows, by the age of their oldest gradient: 0, 1, 2-3, 4-7, ... steps; the
        last of 16 bins takes all that is older."""
        return self._slots.sums[kernels.MASS :].copy()

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All residuals and totals as fresh arrays, for a checkpoint; cached rows and the log are left out.

        Raises ValueError while a selection is not committed."""
        self._check_closed()
        return row_pool_state.of_slots(self._slots)

    def load(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Replaces everything by a state; into a pool of the same capacity bit for bit, slots included.

        Raises ValueError when it is of another dim or has more rows than there are slots; then nothing has changed."""
        row_pool_state.into_slots(self._slots, state)
        self._open = None

    def _aged(self, due: int) -> Ints:
        slots = np.empty(1024, dtype=np.int64)
        count = kernels.find_aged(self._slots.pool, due, slots)
        if count > slots.size:
            slots = np.empty(count, dtype=np.int64)
            kernels.find_aged(self._slots.pool, due, slots)
        return slots[:count]

    def _select(
        self,
        step: int,
        starts_T1: Ints,
        ids_V: Ints,
        grad_VD: Floats,
        count: int,
        marks: npt.NDArray[np.uint8],
        due: int,
        aged: Ints,
    ) -> Selected:
        self._slots.reserve(ids_V.size + aged.size)
        rows = StepRows.of(ids_V.size)
        if len(self._extras.heads) < ids_V.size + aged.size:
            self._extras = ExtraRows.of(ids_V.size + aged.size, self.dim)
        counts = np.empty(kernels.COUNTS, dtype=np.int64)
        kernels.select(
            self._slots.pool,
            step,
            starts_T1,
            ids_V,
            grad_VD,
            marks,
            count,
            due,
            aged,
            *rows.arrays,
            *self._extras.arrays,
            counts,
        )
        selected = self._gathered(step, starts_T1, ids_V, grad_VD, rows, counts)
        self._open = selected
        return selected

    def _gathered(
        self, step: int, starts_T1: Ints, ids_V: Ints, grad_VD: Floats, rows: StepRows, counts: Ints
    ) -> Selected:
        """Copies the rows that `kernels.select` chose, each table's sorted by id."""
        num_extra = int(counts[kernels.NUM_EXTRA])
        heads = self._extras.heads[:num_extra]
        order_E = np.lexsort((heads[:, kernels.EXTRA_ID], heads[:, kernels.EXTRA_TABLE]))
        size = num_extra + int(np.count_nonzero(rows.fates_V == kernels.SENT))
        selected = Selected.empty(
            starts_T1.size, size, self.dim, int(counts[kernels.NUM_OVERFLOW]), int(counts[kernels.NUM_BAD])
        )
        kernels.gather(
            self._slots.pool,
            step,
            starts_T1,
            ids_V,
            grad_VD,
            *rows.arrays,
            *self._extras.arrays,
            order_E,
            selected.starts_T1,
            selected.ids_K,
            selected.rows_KD,
            selected.squares_K,
            selected.scores_K,
            selected.slots_K,
            selected.ages_K,
        )
        return selected

    def _check_closed(self) -> None:
        if self._open is not None:
            raise ValueError("the last selection was not committed")

    def _check_cache(self) -> None:
        if not len(self._rows_SC):
            raise ValueError("this pool keeps no rows; make it with cache=True")


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
