"""RowIndex: from 64-bit ids to slots of records. Open addressing; grows and shrinks a little with every call, never all
at once.
"""
# U = unique ids

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Ids, Ints
from shardkeep.base.errors import JobError
from shardkeep.ps.placement import BUCKET_BITS, BUCKETS
from shardkeep.ps.server.pages import LARGE, SMALL, Pages
from shardkeep.ps.server.table import index_kernels
from shardkeep.ps.server.table.index_kernels import BOUND, FACTOR, FIRST, LOWEST_KEY
from shardkeep.ps.server.table.records import Records

MAX_ROWS = 3_000_000_000
"""An entry has 32 bits for the hash, so that an index has fewer than 2**32 entries."""
_MOST_WORDS = 1 << 32
_FULL = 0.7
_GROWTH = 1.15
"""A table takes about 12 bytes per row for its index, 0.67 of it taken. A smaller factor, or slower moves, would leave
longer chains, and look-ups would be slower."""
MOVE_AT_LEAST = 4096
MOVES_PER_ROW = 16
"""Entries moved for each id that may be added: an outgrown array gets at most 0.7 + 1/16 full, even when all new ids
go there. Were one full, a search for an absent id would never end."""
_FEW = 0.15
"""Below this share of taken entries the index shrinks; it is then far from growing again, and the other way round."""
SHRINK_FROM_BYTES = 1 << 20
_LARGE_FROM_BYTES = 4 << 20
EVERY_HASH = 1 << 32
_ENOUGH = 64
"""Ids whose keys show how many more are to come."""


class RowIndex:
    """Hands out slots 0, 1, 2, ... in the order in which ids are added. Any 64-bit pattern is an id. Not thread safe.

    An entry has 8 bytes; the ids are in `records`. When 0.7 of the entries are taken, an array 1.15 times as large
    replaces the old one. Each later call moves some entries, front to back, and frees their memory. So no single call
    moves all entries, and there are never two full arrays. When few entries are taken, a smaller array replaces the old
    one in the same way.

    Entries are in the order of the placement keys, so that the rows of a bucket are found together.
    """

    def __init__(self, records: Records, descriptor: Any, buckets: tuple[int, int] = (0, BUCKETS)) -> None:
        """`descriptor`: the table's, which has `records`; kernels find the index there, and write the number of ids.
        `buckets`: [first, end) of the ids that come; others are found too, but slowly if they are many."""
        self.records, self._descriptor = records, descriptor
        self._first_bucket, end = self.buckets = buckets
        self._factor = EVERY_HASH // (end - self._first_bucket)
        self._entries = self._made(0, 0)
        self._old: Pages[np.uint64] | None = None
        self._none = self._entries.array[:FIRST].copy()  # for `old`: no entries
        self._none[BOUND] = EVERY_HASH
        self._reserved = 0
        self.moved = 0
        """Entries of the outgrown array that have moved."""
        self.given_back = self._given_back_to = 0
        """Bytes of the outgrown array that the system has back."""
        self._describe()

    def __len__(self) -> int:
        return int(self._descriptor["count"])

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries' pages that have been touched and not given back."""
        if self._old is None:
            return self._entries.array.nbytes
        share = self.moved / (self._old.array.size - FIRST)
        reached = int(share * self._entries.array.size) + 512  # chains may end a little further on
        touched = min(self._entries.up(reached), self._entries.array.nbytes)
        return touched + self._old.array.nbytes - self.given_back

    @property
    def num_entries(self) -> int:
        """Entries, taken or not, without those of the outgrown array."""
        return self._entries.array.size - FIRST

    @property
    def entries(self) -> npt.NDArray[np.uint64]:
        """The entries; another array after `make_room` and `shrink`."""
        return self._entries.array

    @property
    def old(self) -> npt.NDArray[np.uint64]:
        """Entries not yet moved; another array after `make_room` and `shrink`."""
        return self._none if self._old is None else self._old.array

    def _describe(self) -> None:
        """Tells kernels where the entries are, and up to how many rows nobody has to call `make_room`."""
        index = self._descriptor["index"]
        index["entries"], index["num_entries"] = self.entries.ctypes.data, self.entries.size
        index["old"], index["num_old"] = self.old.ctypes.data, self.old.size
        index["room"] = 0 if self._old is not None else min(self.records.capacity, self._limit)

    def make_room(self, extra: int, *, reserve: bool = False) -> None:
        """Makes room for `extra` more ids, in the index and the records. Call it before the kernel `find_or_add`.

        `reserve`: for all that `make_room_for` will see, in whatever order. Raises JobError when a shard would hold
        more than MAX_ROWS."""
        needed = len(self) + extra
        if needed > MAX_ROWS:
            raise JobError(f"a table gets {needed} rows on one server; allowed: {MAX_ROWS}; use more servers")
        self.records.reserve(needed)
        self._reserved = needed if reserve else self._reserved
        share = max(MOVE_AT_LEAST, MOVES_PER_ROW * extra)
        self._move(share)
        if needed > self._limit:
            while self._old is not None:
                self._move(self._old.array.size)
            self._old, self._entries = self._entries, self._made(self._entries.array.size, needed)
            self._move(share)
        self._describe()

    def make_room_for(self, ids_U: Ids) -> None:
        """As `make_room`, for ids that may come in the order of their placement keys, as files have them. If these have
        a part of all keys and are not reserved, room is made for as many in the rest: else all would be in few entries.
        """
        extra = ids_U.size
        if extra >= _ENOUGH and len(self) + extra > self._reserved:
            hashes = np.empty(extra, dtype=np.uint64)
            index_kernels.hashes_of(self.entries, ids_U, hashes)
            lowest, highest = int(hashes.min()), int(hashes.max())
            extra = max(extra, extra * (EVERY_HASH - lowest) // (highest - lowest + 1))
        self.make_room(min(extra, MAX_ROWS - len(self)) if ids_U.size + len(self) <= MAX_ROWS else ids_U.size)

    def shrink(self, removed: int) -> None:
        """Moves some entries after so many rows were removed, if a move is under way or most entries are empty. No call
        costs more than one that adds as many rows."""
        num_entries = self.num_entries
        few = len(self) < _FEW * num_entries and self._entries.array.nbytes >= SHRINK_FROM_BYTES
        if self._old is None and not few:
            return
        if self._old is None:
            # As many rows may be added as the move needs: it ends before the new array is full.
            least = max(2 * len(self), len(self) + num_entries // MOVES_PER_ROW + 1)
            self._old, self._entries = self._entries, self._made(0, least)
        self._move(max(MOVE_AT_LEAST, MOVES_PER_ROW * removed))
        self._describe()

    def hashes(self, first: int, end: int) -> tuple[int, int]:
        """The range of hashes that the ids of placement buckets [first, end) have."""
        return (first - self._first_bucket) * self._factor, (end - self._first_bucket) * self._factor

    def slots_between(self, first: int, end: int) -> Ints:
        """The slots of the rows whose hashes are in [first, end)."""
        bounds = np.uint64(first), np.uint64(end)
        slots = np.empty(64 + 2 * (len(self) * (end - first) >> 32), dtype=np.int64)
        while (count := index_kernels.slots_between(self._descriptor, *bounds, slots)) > slots.size:
            slots = np.empty(count, dtype=np.int64)
        return slots[:count]

    @property
    def _limit(self) -> int:
        return int(_FULL * self.num_entries)

    def _move(self, count: int) -> None:
        if self._old is None:
            return
        old = self._old.array
        end = min(self.moved + count, old.size - FIRST)
        index_kernels.move_entries(self.entries, old, FIRST + self.moved, FIRST + end)
        self.moved = end
        if end == old.size - FIRST:
            self._old, self.moved, self.given_back, self._given_back_to = None, 0, 0, 0
            return
        # The last chains may wrap around to the first entries, which therefore stay.
        begin = max(self._given_back_to, self._old.up(1 + index_kernels.first_empty(old)))
        size = self._old.give_back(begin, FIRST + end)
        self._given_back_to = begin + size
        self.given_back += size

    def _made(self, words_before: int, needed: int) -> Pages[np.uint64]:
        """An empty array of whole pages, for at least `needed` ids."""
        least, usual = int(needed / _FULL) + 1 + FIRST, int(_GROWTH * words_before)
        page_bytes = LARGE if 8 * max(least, usual) >= _LARGE_FROM_BYTES else SMALL
        per_page = page_bytes // 8
        num_pages = max(-(-least // per_page), round(usual / per_page))
        made = Pages(min(num_pages * per_page, _MOST_WORDS), np.uint64, page_bytes=page_bytes)
        made.array[LOWEST_KEY], made.array[FACTOR] = self._first_bucket << (64 - BUCKET_BITS), self._factor
        return made
