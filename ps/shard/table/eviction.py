"""Eviction: which rows of a table go, by placement bucket. The same on any number of servers where the clock is steps.

In each step a share of the buckets is looked at for rows that are too old or score too low, and every bucket that got
more rows than its share of the table's capacity loses an eighth of that share.
"""
# U = rows, B = buckets

from __future__ import annotations

import math
import time

import numpy as np

from shardkeep.base.arrays import Ids, Ints, UInt64s
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.policy_config import EvictConfig
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.capacity import capacity_of
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.table import Table

_CUT = 8
"""A bucket that is too full loses this part of its capacity."""


class Eviction:
    """The rules of one table. The caller holds the table's locks."""

    def __init__(self, table: Table, config: EvictConfig) -> None:
        self.table = table
        self._config = config
        self.capacity = capacity_of(table.spec)
        """Rows of a bucket; 0 = any number."""
        ttl = config.ttl_steps if config.ttl_s is None else config.ttl_s
        log_decay, by_score = math.log(config.decay) / config.decay_steps, config.policy == "lfu"
        self.rules = np.array([ttl or 0, config.delete_below or 0, log_decay, by_score, self.capacity], np.float64)
        """As the kernels take them."""
        self.period = config.sweep_steps if ttl or config.delete_below else 0
        """Steps in which every bucket is looked at once; 0 = never."""
        self.pinned: Ids = np.unique(np.array(config.pinned, dtype=np.int64))
        """Ids whose rows never go, which rise."""

    @property
    def in_seconds(self) -> bool:
        """Whether the clock is the time of day, not the step."""
        return self._config.ttl_s is not None

    def clock(self, update: Update) -> int:
        """The clock of an update: the step of the job and those before it, or seconds."""
        return int(time.time()) if self.in_seconds else update.step + update.earlier_steps

    def lowest(self, over_B: Ints, counts_B: Ints, update: Update) -> Ints:
        """The slots of the rows that go from buckets with too many. `counts_B`: rows of each bucket."""
        slots, over_B = np.empty(int(counts_B[over_B].sum()), dtype=np.int64), np.sort(over_B)
        first, factor = self.table.buckets[0], np.uint64(self.table.hashes(0, 1)[1] - self.table.hashes(0, 1)[0])
        count = at.lowest(
            self.table.descriptor, over_B, factor, counts_B, first, self.clock(update), self.rules, self.pinned,
            self.capacity, self.capacity // _CUT, slots,
        )  # fmt: skip
        return slots[:count]


def swept_hashes(periods_E: Ints, buckets: tuple[int, int], factor: int, update: Update) -> UInt64s:
    """The ranges of hashes [begin, end), uint64 (E, 2), whose rows are looked at after an update.

    `periods_E`: those of tables. `buckets`, `factor`: the server's, and hashes of a bucket."""
    periods_E1 = np.maximum(periods_E, 1)[:, None]
    shares_E2 = (update.step + update.earlier_steps) % periods_E1 + np.arange(2)
    ranges_E2 = np.clip(shares_E2 * BUCKETS // periods_E1, *buckets) - buckets[0]
    ranges_E2[periods_E == 0] = 0
    swept: UInt64s = (ranges_E2 * factor).astype(np.uint64)
    return swept
