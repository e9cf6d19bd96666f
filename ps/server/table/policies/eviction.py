"""Eviction: which rows of a table go, by placement bucket. The same on any number of servers where the clock is steps.

In each step a share of the buckets is looked at for rows that are too old, and every bucket that got more rows than
its share of the table's capacity loses an eighth of that share.
"""
# U = rows, B = buckets

from __future__ import annotations

import math

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.table.policies import policy_kernels
from shardkeep.ps.server.table.table import Table

_CUT = 8
"""A bucket that is too full loses this part of its capacity."""


class Eviction:
    """The rules of one table, in its descriptor. The caller holds the table's locks."""

    def __init__(self, table: Table) -> None:
        config = table.spec.evict
        assert config is not None  # the caller knows that it is set
        self._table = table
        ttl = config.ttl_steps if config.ttl_s is None else config.ttl_s
        rules = table.descriptor["policies"]["rules"]
        rules["ttl"], rules["in_seconds"] = ttl or 0, config.ttl_s is not None
        rules["log_decay"], rules["by_score"] = math.log(config.decay) / config.decay_steps, config.policy == "lfu"
        rules["period"] = config.sweep_steps if ttl else 0
        self._capacity = (config.max_rows or 0) // BUCKETS
        shape = BUCKETS if self._capacity else 0
        self._bucket_rows, self._full_buckets = np.zeros(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        self._buckets = buckets = rules["buckets"]
        buckets["capacity"], buckets["rows"] = self._capacity, self._bucket_rows.ctypes.data
        buckets["full"] = self._full_buckets.ctypes.data

    def remove(self, slots_U: Ints) -> None:
        """Removes rows, and counts them."""
        self._table.descriptor["policies"]["evicted_rows"] += slots_U.size
        self._table.remove(slots_U)

    def remove_lowest(self) -> None:
        """Removes the lowest rows of the buckets that have too many, which no longer count as full."""
        full_B, self._buckets["num_full"] = np.sort(self._full_buckets[: self._buckets["num_full"]]), 0
        slots = np.empty(int(self._bucket_rows[full_B].sum()), dtype=np.int64)
        self.remove(slots[: policy_kernels.lowest(self._table.descriptor, full_B, self._capacity // _CUT, slots)])
