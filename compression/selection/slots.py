"""The slots of a pool: flat arrays made once, an index from (table, id) to slots, and a log that undoes whole steps.

Knows neither selection nor caching: kernels change the slots (slot_kernels.py), this owns them. Not thread safe.
"""
# S = slots, W = values of a slot's state, N = rows with a state, T = tables of the group, V = a step's rows

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Floats, Ints
from shardkeep.compression.selection import slot_kernels as k

Array = npt.NDArray[np.generic]
State = Mapping[str, Array]
"""tables, ids, counts int64 (N,), squares, scores float32 (N,), rests float32 (N, D), by table and id; sums
float64; control int64 [step, lost rows]; and, if of one pool, its layout: slots (N,), free (S - N,), hand, int64."""

_HEADS = {"tables": k.TABLE, "ids": k.ID, "counts": k.COUNT}
_STATS = {"squares": k.SQUARES, "scores": k.SCORE}
"""Columns of the heads, and of the stats, by their names in a state."""


@dataclasses.dataclass(slots=True)
class _StepLog:
    """What the slots touched since the start of a step held then: slot, content."""

    step: int
    control: Ints
    log_LH: Ints


class RowSlots:
    """`capacity` slots for rows of all tables of a group, each with a state of `width` float32 values.

    Bytes: 64 + 4 * width a slot, 16-32 for the index; a log of the last `history` steps takes 72 + 4 * width for each
    slot that a step touches."""

    def __init__(self, *, width: int, capacity: int, history: int) -> None:
        if min(width, capacity) < 1 or history < 0:
            raise ValueError(f"width {width}, capacity {capacity}, history {history}; allowed: 1 and 0 or more")
        self.capacity, self.width = capacity, width
        columns = k.HEAD + (width + 1) // 2
        self.heads_SH = _aligned(capacity * columns * 8).view(np.int64).reshape(capacity, columns)
        """Whose the slots are; columns: slot_kernels.py."""
        self.floats_SF = self.heads_SH.view(np.float32)
        """The same memory, for sums of squares, scores and states."""
        self.states_SW = self.floats_SF[:, k.STATE : k.STATE + width]
        """States; those of slots that are not UNSENT mean nothing."""
        self._index = np.zeros(1 << (2 * capacity - 1).bit_length(), dtype=np.uint64)
        self._pool = np.zeros(k.LOG_AT + 1, dtype=np.int64)
        self._pool[[k.CAPACITY, k.COLUMNS, k.ENTRIES]] = capacity, columns, self._index.size
        self._pool[[k.SLOTS_AT, k.INDEX_AT]] = self.heads_SH.ctypes.data, self._index.ctypes.data
        self.control = self._pool[: k.CONTROL]
        """Numbers that go back with the slots; a view."""
        self._control_f8 = self.control.view(np.float64)
        self.step = -1
        """The last step that was begun."""
        self.is_open = False
        """Whether a step was begun and not closed."""
        self._steps: deque[_StepLog] = deque(maxlen=history)
        self.clear()

    def pool(self, touched: int = 0) -> k.Pool:
        """All of this, for a kernel that touches at most so many slots."""
        self._pool[k.LOG_ROOM] = 0
        if self._steps:
            last, used = self._steps[-1], int(self.control[k.LOGGED])
            room = min(used + touched, self.capacity)
            if room > len(last.log_LH):
                grown_LH = np.empty((max(room, 2 * used), last.log_LH.shape[1]), dtype=np.int64)
                grown_LH[:used] = last.log_LH[:used]
                last.log_LH = grown_LH
            self._pool[[k.LOG_ROOM, k.LOG_AT]] = len(last.log_LH), last.log_LH.ctypes.data
        return self._pool

    @property
    def num_unsent(self) -> int:
        """Slots with a residual."""
        return int(self.control[k.NUM_UNSENT])

    @property
    def lost_rows(self) -> int:
        """Rows whose rounding error was given up."""
        return int(self.control[k.LOST_ROWS])

    @property
    def lost_squares(self) -> float:
        """Sum of squares of what was given up."""
        return float(self._control_f8[k.LOST_SQUARES])

    def unsent_norm(self, dim: int) -> float:
        """L2 norm of the first `dim` values of all residuals together, summed in float64."""
        return float(np.sqrt((self.states_SW[self.unsent(), :dim].astype(np.float64) ** 2).sum()))

    def unsent(self) -> Ints:
        """The slots with a residual, ascending."""
        return np.flatnonzero(self.heads_SH[:, k.FLAGS] & k.UNSENT)

    def waiting_untouched(self) -> Ints:
        """The slots in which a gradient waits, and not only a rounding error, of no row of this step, ascending."""
        waits_S = (self.heads_SH[:, k.FLAGS] & k.UNSENT) * self.heads_SH[:, k.COUNT]
        return np.flatnonzero(waits_S * (self.heads_SH[:, k.STAMP] != self.control[k.SERIAL]))

    def clear(self) -> None:
        """Frees all slots and forgets the logs; totals are zero."""
        self.heads_SH[:] = 0
        self.control[:] = 0
        self.is_open = False
        self._steps.clear()
        _put_free(self, np.arange(self.capacity))
        k.rebuild(self.pool())

    def begin(self, step: int) -> None:
        """Starts a step. Raises ValueError where steps do not rise, or the last selection was not committed."""
        self._check_closed()
        if step <= self.step:
            raise ValueError(f"step {step} after step {self.step}; steps rise, rewind to go back")
        self.step, self.is_open = step, True
        full = 0 < len(self._steps) == self._steps.maxlen
        log_LH = self._steps.popleft().log_LH if full else np.empty((0, 1 + self.heads_SH.shape[1]), dtype=np.int64)
        self._steps.append(_StepLog(step, self.control.copy(), log_LH))
        self.control[k.SERIAL] += 1
        self.control[k.LOGGED] = 0

    def rewind(self, step: int) -> None:
        """Back to the content at the start of `step`, totals included, without cached rows or an open selection: as if
        later steps had never been. The same calls then give the same bits.

        Raises KeyError when the log of a step to undo is gone, and changes nothing then."""
        if step <= self.step and not (self._steps and self._steps[0].step <= step):
            held = f"{self._steps[0].step} to {self.step}" if self._steps else "none"
            raise KeyError(f"step {step} is no longer kept (kept: {held})")
        while self._steps and self._steps[-1].step >= step:
            undone = self._steps.pop()
            slots, contents_LH = np.split(undone.log_LH[: self.control[k.LOGGED]], [1], axis=1)
            self.heads_SH[slots[:, 0]] = contents_LH
            self.control[:] = undone.control
        self.is_open = False
        self.step = min(self.step, step - 1)
        k.rebuild(self.pool())
        self.forget_rows()

    def forget_rows(self) -> None:
        """Forgets all cached rows; slots without a residual become free."""
        k.forget_rows(self.pool(self.capacity))

    def state(self) -> dict[str, Array]:
        """All residuals and totals as fresh arrays, for a checkpoint; cached rows and the log are left out: slots of
        cached rows count as free, after those that are.

        Raises ValueError while a selection is not committed."""
        self._check_closed()
        held, heads = self.unsent(), self.heads_SH
        held = held[np.lexsort((heads[held, k.ID], heads[held, k.TABLE]))]
        clean = np.flatnonzero((heads[:, k.FLAGS] != 0) & (heads[:, k.FLAGS] & k.UNSENT == 0))
        return {
            **{name: heads[held, column] for name, column in _HEADS.items()},
            **{name: self.floats_SF[held, column] for name, column in _STATS.items()},
            "rests": self.states_SW[held],
            "sums": self._control_f8[[k.LOST_SQUARES]],
            "control": np.array([self.step, self.control[k.LOST_ROWS]], dtype=np.int64),
            "slots": held,
            "free": np.concatenate([_free_slots(self), clean]),
            "hand": self.control[[k.HAND]],
        }

    def load(self, state: State) -> None:
        """Replaces everything by a state; of as many slots bit for bit, places included.

        Raises ValueError when it is of another dim or has more rows than there are slots; then nothing has changed."""
        size = len(state["ids"])
        if state["rests"].shape != (size, self.width):
            raise ValueError(f"a state of residuals {state['rests'].shape}; expected {(size, self.width)}")
        if size > self.capacity:
            raise ValueError(f"{size} rows of unsent gradient do not fit {self.capacity} slots; raise pool_rows")
        self.clear()
        exact = "slots" in state and size + len(state["free"]) == self.capacity
        held = np.asarray(state["slots"], dtype=np.int64) if exact else np.arange(size)
        for view, columns in ((self.heads_SH, _HEADS), (self.floats_SF, _STATS)):
            for name, column in columns.items():
                view[held, column] = state[name]
        self.heads_SH[held, k.FLAGS], self.heads_SH[held, k.READ] = k.USED | k.UNSENT, -1
        self.states_SW[held] = state["rests"]
        _put_free(self, np.asarray(state["free"], dtype=np.int64) if exact else np.arange(size, self.capacity))
        self._control_f8[k.LOST_SQUARES] = state["sums"][0]
        self.step = int(state["control"][0])
        self.control[k.LOST_ROWS], self.control[k.NUM_UNSENT] = state["control"][1], size
        self.control[k.HAND] = state["hand"][0] if exact else 0
        k.rebuild(self.pool())

    def _check_closed(self) -> None:
        if self.is_open:
            raise ValueError("the last selection was not committed")


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
    rises = np.append(True, ids_V[1:] > ids_V[:-1])
    rises[starts_T1[starts_T1 < ids_V.size]] = True
    if ids_V.size and not rises.all():
        at = int(rises.argmin())
        raise ValueError(f"id {ids_V[at]} at position {at} follows {ids_V[at - 1]}; ids are sorted and unique")


def _put_free(slots: RowSlots, order: Ints) -> None:
    """Makes those slots free, to be taken in that order; all others must have a row or get one."""
    slots.heads_SH[order, k.FLAGS] = 0
    slots.heads_SH[order, k.ID] = np.append(order[1:], -1) if order.size else order
    slots.control[k.FREE] = order[0] if order.size else -1


def _free_slots(slots: RowSlots) -> Ints:
    """The free slots in the order in which they will be taken."""
    order = []
    slot = int(slots.control[k.FREE])
    while slot >= 0:
        order.append(slot)
        slot = int(slots.heads_SH[slot, k.ID])
    return np.array(order, dtype=np.int64)


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin at a cache line."""
    room = np.zeros(size_bytes + 63, dtype=np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size_bytes]


def merge(states: Sequence[State]) -> dict[str, Array]:
    """The states' sum by table and id, for resuming with another number of workers: residuals (added in float64),
    squares, counts, scores (no less than the score of the sum) and totals add up.

    Raises ValueError for no states or such of different dims."""
    if len({state["rests"].shape[1] for state in states}) != 1:
        raise ValueError(f"{len(states)} states of residuals {[s['rests'].shape for s in states]}; allowed: one dim")
    joined = np.concatenate([np.stack([state["tables"], state["ids"]]) for state in states], axis=1)
    keys, group = np.unique(joined, axis=1, return_inverse=True)
    return {
        "tables": keys[0],
        "ids": keys[1],
        **{name: _summed(states, name, group.reshape(-1), keys.shape[1]) for name in ("counts", "rests", *_STATS)},
        "sums": np.sum([state["sums"] for state in states], axis=0),
        "control": np.array(
            [max(int(s["control"][0]) for s in states), sum(int(s["control"][1]) for s in states)], dtype=np.int64
        ),
    }


def _summed(states: Sequence[State], name: str, group: Ints, size: int) -> Array:
    """The sums by group, added in float64."""
    values = np.concatenate([state[name] for state in states])
    summed = np.zeros((size, *values.shape[1:]))
    np.add.at(summed, group, values.astype(np.float64))
    return summed.astype(values.dtype)
