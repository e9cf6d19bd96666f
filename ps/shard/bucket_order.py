"""The slots of records in the order of their ids' placement buckets."""
# N = rows, B = buckets

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard import mark_kernels as at
from shardkeep.ps.shard.pages import SMALL, Pages
from shardkeep.ps.shard.records import Records

_SLOTS_AT_ONCE = 1 << 19


def bucket_order(
    records: Records, count: int, between: Callable[[], None] = lambda: None
) -> tuple[Pages[np.uint32], npt.NDArray[np.int64]]:
    """The first `count` slots sorted by bucket (4 bytes each), and where each bucket starts in them (BUCKETS + 1).

    Records may change and grow meanwhile, as ids stay. `between` is called every some milliseconds."""
    place = records.addresses, records.shift, records.width
    starts_B1 = np.zeros(BUCKETS + 1, dtype=np.int64)
    order_N = Pages(count, np.uint32, page_bytes=SMALL)
    parts = [(begin, min(begin + _SLOTS_AT_ONCE, count)) for begin in range(0, count, _SLOTS_AT_ONCE)]
    for begin, end in parts:
        at.count_buckets(*place, begin, end, starts_B1[1:])
        between()
    np.cumsum(starts_B1, out=starts_B1)
    next_B = starts_B1[:-1].copy()
    for begin, end in parts:
        at.sort_slots(*place, begin, end, next_B, order_N.array)
        between()
    return order_N, starts_B1
