"""The slots of a pool: flat arrays made once, an index from (table, id) to slots, and a log that undoes whole steps.

Knows neither selection nor caching: kernels change the slots (slot_kernels.py), this owns them. Not thread safe.
"""
# S = slots, W = values of a slot's residual

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Floats, Ints
from shardkeep.compression.selection import slot_kernels as k

_LOG_START = 1024


class _Log:
    """What the slots touched since the start of `step` held then."""

    def __init__(self, width: int) -> None:
        self.step = 0
        self.count = 0
        self.control, self.sums = np.empty(0, dtype=np.int64), np.empty(0)
        self.arrays = _log_arrays(_LOG_START, width)

    def reserve(self, entries: int) -> None:
        """Room for that many more entries."""
        room = len(self.arrays[0])
        if self.count + entries <= room:
            return
        grown = _log_arrays(max(self.count + entries, 2 * room), self.arrays[2].shape[1])
        for column in range(len(grown)):
            grown[column][: self.count] = self.arrays[column][: self.count]
        self.arrays = grown


class RowSlots:
    """`capacity` slots for rows of all tables of a group, each with a residual of `width` float32 values.

    Bytes: 64 + 4 * width a slot, 16-32 for the index; a log of the last `history` steps takes 72 + 4 * width for each
    slot that a step touches."""

    def __init__(self, *, width: int, capacity: int, history: int, num_sums: int) -> None:
        """`num_sums`: float64 totals that go back with the slots."""
        self.capacity, self.width, self.history = capacity, width, history
        self.heads_SH = _aligned(capacity * k.HEAD * 8).view(np.int64).reshape(capacity, k.HEAD)
        """Whose the slots are; columns: slot_kernels.py."""
        self.stats_SC = self.heads_SH.view(np.float32)
        """The same memory, for sums of squares and scores."""
        self.rests_SW = _aligned(capacity * width * 4).view(np.float32).reshape(capacity, width)
        """Residuals; those of slots that are not UNSENT mean nothing."""
        self._index = np.zeros(1 << (2 * capacity - 1).bit_length(), dtype=np.uint64)
        self.sums = np.zeros(num_sums)
        self.pool = np.zeros(k.COLUMNS, dtype=np.int64)
        """All of this, as kernels take it."""
        self.control = self.pool[: k.CONTROL]
        """Numbers that go back with the slots; a view."""
        self.step = -1
        """The last step that was begun."""
        self._logs: deque[_Log] = deque()
        self._spare: _Log | None = None
        self._no_log = _log_arrays(0, width)
        self._serial = 0
        arrays = (self.heads_SH, self.rests_SW, self._index, self.sums)
        self.pool[[k.CAPACITY, k.WIDTH, k.ENTRIES, k.NUM_SUMS]] = capacity, width, self._index.size, num_sums
        self.pool[k.HEADS_AT : k.LOG_SLOTS_AT] = [array.ctypes.data for array in arrays]
        self.clear()

    @property
    def num_unsent(self) -> int:
        """Slots with a residual."""
        return int(self.control[k.NUM_UNSENT])

    def unsent(self) -> Ints:
        """The slots with a residual, ascending."""
        return np.flatnonzero(self.heads_SH[:, k.FLAGS] & k.UNSENT)

    def free(self) -> Ints:
        """The free slots in the order in which they will be taken."""
        order = []
        slot = int(self.control[k.FREE])
        while slot >= 0:
            order.append(slot)
            slot = int(self.heads_SH[slot, k.ID])
        return np.array(order, dtype=np.int64)

    def clear(self) -> None:
        """Frees all slots and forgets the logs; totals are zero."""
        self.heads_SH[:] = 0
        self.control[:] = 0
        self.sums[:] = 0.0
        self._logs.clear()
        self.put_free(np.arange(self.capacity))
        k.rebuild(self.pool)
        self.renew()

    def put_free(self, order: Ints) -> None:
        """Makes those slots free, to be taken in that order; all others must have a row or get one."""
        self.heads_SH[order, k.FLAGS] = 0
        self.heads_SH[order, k.ID] = np.append(order[1:], -1) if order.size else order
        self.control[k.FREE] = order[0] if order.size else -1

    def begin(self, step: int) -> None:
        """Starts a step's log. Steps rise; raises ValueError otherwise."""
        if step <= self.step:
            raise ValueError(f"step {step} after step {self.step}; steps rise, rewind to go back")
        self.step = step
        self.reserve(0)
        if self.history:
            full = len(self._logs) == self.history
            log = self._logs.popleft() if full else self._spare or _Log(self.width)
            self._spare = None
            log.step, log.count = step, 0
            log.control, log.sums = self.control.copy(), self.sums.copy()
            self._logs.append(log)
        self.renew()

    def reserve(self, slots: int) -> None:
        """Room in the log for that many touched slots. Call it before a kernel that touches them."""
        if self._logs:
            log = self._logs[-1]
            log.count = int(self.control[k.LOGGED])
            log.reserve(min(slots, self.capacity))
            self._name_log()

    def rewind(self, step: int) -> None:
        """Back to the content at the start of `step`, without cached rows: as if later steps had never been.

        Raises KeyError when the log of a step to undo is gone, and changes nothing then."""
        if step <= self.step and not (self._logs and self._logs[0].step <= step):
            kept = f"{self._logs[0].step} to {self.step}" if self._logs else "none"
            raise KeyError(f"step {step} is no longer kept (kept: {kept})")
        self.reserve(0)
        while self._logs and self._logs[-1].step >= step:
            log = self._logs[-1]
            self._name_log()
            k.undo(self.pool, log.count)
            self.control[:], self.sums[:] = log.control, log.sums
            self._spare = self._logs.pop()
        self.step = min(self.step, step - 1)
        k.rebuild(self.pool)
        self.renew()
        self.forget_rows()

    def forget_rows(self) -> None:
        """Forgets all cached rows; slots without a residual become free."""
        self.reserve(self.capacity)
        k.forget_rows(self.pool)

    def renew(self) -> None:
        """From now on no slot counts as touched."""
        self._serial += 1
        self.control[k.SERIAL] = self._serial
        self.control[k.LOGGING] = bool(self._logs)
        self.control[k.LOGGED] = self._logs[-1].count if self._logs else 0
        self._name_log()

    def _name_log(self) -> None:
        arrays = self._logs[-1].arrays if self._logs else self._no_log
        self.pool[k.LOG_ROOM] = len(arrays[0])
        self.pool[k.LOG_SLOTS_AT :] = [array.ctypes.data for array in arrays]


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin at a cache line."""
    room = np.zeros(size_bytes + 63, dtype=np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size_bytes]


def _log_arrays(room: int, width: int) -> tuple[Ints, Ints, Floats]:
    heads_LH = np.empty((room, k.HEAD), dtype=np.int64)
    return np.empty(room, dtype=np.int64), heads_LH, np.empty((room, width), dtype=np.float32)
