"""RowIndex: from 64-bit ids to slots of records. Open addressing; grows a little with every call, never all at once."""
# U = unique ids

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import JobError
from shardkeep.ps.shard import index_kernels
from shardkeep.ps.shard.records import Records

Ids = npt.NDArray[np.int64]

MAX_ROWS = (1 << 32) - 2
"""An entry has 32 bits for slot + 1."""
_FIRST_ENTRIES = 64
_MOVE_AT_LEAST = 4096
_CLEAR_AT_LEAST = 1 << 17
_NOTHING = np.zeros(1, dtype=np.uint64)


class RowIndex:
    """Hands out slots 0, 1, 2, ... in the order in which ids are added. Any 64-bit pattern is an id. Not thread safe.

    An entry has 8 bytes; the ids stand in `records`. When three quarters of the entries are taken, an index of
    twice the size takes the new ones, and each later call moves a share of the old ones: no call pays for all.
    """

    def __init__(self, records: Records | None = None) -> None:
        self.records = records if records is not None else Records(2)
        self._entries = np.zeros(_FIRST_ENTRIES, dtype=np.uint64)
        self._old = _NOTHING
        self._moved = 0
        self._next = _NOTHING
        self._cleared = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries, without the records."""
        return self._entries.nbytes + self._old.nbytes + 8 * min(self._cleared, self._next.size)

    @property
    def entries(self) -> npt.NDArray[np.uint64]:
        """The entries as kernels take them; another array after `make_room`."""
        return self._entries

    @property
    def old(self) -> npt.NDArray[np.uint64]:
        """Entries not yet moved, as kernels take them; another array after `make_room`."""
        return self._old

    def find(self, ids_U: Ids) -> Ids:
        """Slots of ids, int64; -1 where an id is absent. Changes nothing."""
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        records = self.records
        index_kernels.find(self._entries, self._old, ids_U, records.addresses, records.shift, records.width, slots_U)
        return slots_U

    def find_or_add(self, ids_U: Ids) -> Ids:
        """Slots of unique ids, int64; absent ones are added and get the slots from len(self) on.

        Raises what `make_room` raises."""
        records = self.records
        self.make_room(ids_U.size)
        slots_U = np.empty(ids_U.size, dtype=np.int64)
        place = (records.addresses, records.shift, records.width)
        self.added(index_kernels.find_or_add(self._entries, self._old, ids_U, *place, self._count, slots_U))
        return slots_U

    def added(self, count: int) -> None:
        """Notes the new number of ids that the kernel `find_or_add` returned to a caller of its own."""
        self._count = count

    def make_room(self, extra: int) -> None:
        """Makes room for `extra` more ids, in the index and the records. Call it before the kernel `find_or_add`.

        Raises JobError when a shard would hold more than 2**32 - 2 rows."""
        wanted = self._count + extra
        if wanted > MAX_ROWS:
            raise JobError(f"a table gets {wanted} rows on one server; allowed: {MAX_ROWS}; use more servers")
        self.records.reserve(wanted)
        if self._old.size > 1:
            # Four entries for each insert: the move is over long before the new index is full.
            self._move(max(_MOVE_AT_LEAST, 4 * extra))
        if 8 * wanted > 5 * self._entries.size:
            self._prepare(wanted, extra)
        if 4 * wanted > 3 * self._entries.size:
            self._switch()

    def _prepare(self, wanted: int, extra: int) -> None:
        """Clears a part of the next index ahead of the switch: its first inserts would touch all of it at once,
        and the kernel would clear 64 MB or more of fresh pages within one call."""
        size = max(2 * self._entries.size, 1 << (2 * wanted - 1).bit_length())
        if self._next.size < size:
            self._next, self._cleared = np.zeros(size, dtype=np.uint64), 0
        end = self._cleared + max(_CLEAR_AT_LEAST, 32 * extra)
        self._next[self._cleared : end] = 0
        self._cleared = end

    def _switch(self) -> None:
        self._move(self._old.size)  # nothing, by the amounts above; to lose an entry would be to lose a row
        self._old, self._moved = self._entries, 0
        self._entries, self._next = self._next, _NOTHING
        self._move(_MOVE_AT_LEAST)

    def _move(self, entries: int) -> None:
        if self._old.size == 1:
            return
        end = min(self._moved + entries, self._old.size)
        records = self.records
        index_kernels.move_entries(
            self._entries, self._old, self._moved, end, records.addresses, records.shift, records.width
        )
        self._moved = end
        if end == self._old.size:
            self._old, self._moved = _NOTHING, 0
