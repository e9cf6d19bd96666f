"""Sorts the slots of records by the placement bucket of their ids."""
# N = rows, C = chosen rows, B = buckets

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.pages import SMALL, Pages
from shardkeep.ps.shard.table.records import Records

ALL = np.zeros(0, dtype=np.uint8)
_SLOTS_AT_ONCE = 1 << 19


def bucket_order(
    records: Records, count: int, between: Callable[[], None] = lambda: None, *, chosen: Bytes = ALL
) -> tuple[Pages[np.uint32], npt.NDArray[np.int64]]:
    """The first `count` slots sorted by bucket (4 bytes each), and the start of each bucket in them (BUCKETS + 1).

    `chosen` (uint8, 8 slots a byte) selects the slots whose bit is set; ALL selects every slot. Records may change and
    grow during the call, because ids do not change. `between` is called every few milliseconds."""
    place = records.addresses, records.shift, records.width, chosen
    starts_B1 = np.zeros(BUCKETS + 1, dtype=np.int64)
    parts = [(begin, min(begin + _SLOTS_AT_ONCE, count)) for begin in range(0, count, _SLOTS_AT_ONCE)]
    for begin, end in parts:
        at.count_buckets(*place, begin, end, starts_B1[1:])
        between()
    np.cumsum(starts_B1, out=starts_B1)
    next_B = starts_B1[:-1].copy()
    order_C = Pages(int(starts_B1[-1]), np.uint32, page_bytes=SMALL)
    for begin, end in parts:
        at.sort_slots(*place, begin, end, next_B, order_C.array)
        between()
    return order_C, starts_B1
