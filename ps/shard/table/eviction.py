"""Eviction: which rows of a table go, by placement bucket. The same on any number of servers where the clock is steps.

In each step a share of the buckets is looked at for rows that are too old or score too low, and every bucket that got
more rows than its share of the table's capacity loses an eighth of that share.
"""
# U = rows, B = buckets

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from shardkeep.base.arrays import Floats, Ids, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.policy_config import LEAST_PER_BUCKET, EvictConfig
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.table import Table

_CUT = 8
"""A bucket that is too full loses this part of its capacity."""
INDEX_BYTES = 8 / 0.7
"""A row's part of an index that is as full as it gets."""


class Eviction:
    """The rules of one table. The caller holds the table's locks."""

    def __init__(self, table: Table, config: EvictConfig) -> None:
        self.table = table
        self._config = config
        ttl = config.ttl_steps if config.ttl_s is None else config.ttl_s
        log_decay = math.log(config.decay) / config.decay_steps
        by_score = config.policy == "lfu"
        self._rules = np.array([ttl or 0, config.delete_below or 0, log_decay, by_score], dtype=np.float64)
        self._log_decay = log_decay
        self._pinned: Ids = np.unique(np.array(config.pinned, dtype=np.int64))
        self.capacity = capacity_of(table, config)
        """Rows of a bucket; 0 = any number."""
        self._counts_B: Ints = np.zeros(BUCKETS if self.capacity else 0, dtype=np.int64)
        self._over_B: Ints = np.empty(self._counts_B.size, dtype=np.int64)
        self._num_over = self._counted = 0

    def clock(self, update: Update) -> int:
        """The clock of an update: the step of the job and those before it, or seconds."""
        return update.step + update.earlier_steps if self._config.ttl_s is None else int(time.time())

    def pushed(self, slots_U: Ints, pushes_U: Floats, first_new: int, update: Update) -> None:
        """Counts an update of rows. Those in slots from `first_new` on are new."""
        descriptor = self.table.descriptor
        at.reset_counters(descriptor, first_new)
        at.touch(descriptor, slots_U, self.clock(update), pushes_U, self._log_decay)

    def sweep(self, update: Update) -> Iterator[Ints]:
        """Slots of rows that go after an update. The caller removes them before it asks for more."""
        if self.capacity:
            self._count()
        if self._rules[at.TTL] or self._rules[at.BELOW]:
            yield self._expired(update)
        if self._num_over:
            over_B, self._num_over = np.sort(self._over_B[: self._num_over]), 0
            yield self._lowest(over_B, update)

    def remove(self, images: Ints, slots_U: Ints) -> None:
        """Removes rows. A snapshot has room for two pre-images of each."""
        self.table.evicted_rows += slots_U.size
        self.table.remove(images, slots_U, self._counts_B)
        self._counted -= slots_U.size if self.capacity else 0

    def _count(self) -> None:
        """Counts the rows that are new since the last call."""
        over = self._over_B, self._num_over
        self._num_over = at.count_rows(self.table.descriptor, self._counted, self._counts_B, self.capacity, *over)
        self._counted = self.table.num_rows

    def _expired(self, update: Update) -> Ints:
        period, (first, end) = self._config.sweep_steps, self.table.buckets
        share = (update.step + update.earlier_steps) % period
        begin, stop = max(first, share * BUCKETS // period), min(end, (share + 1) * BUCKETS // period)
        if begin >= stop or not self.table.num_rows:
            return np.empty(0, dtype=np.int64)
        slots_U = self.table.slots_between(*self.table.hashes(begin, stop))
        gone_U = np.empty(slots_U.size, dtype=np.bool_)
        at.judge(self.table.descriptor, slots_U, self.clock(update), self._rules, gone_U)
        slots_U = slots_U[gone_U]
        return slots_U[~np.isin(self.table.ids_in(slots_U), self._pinned)] if self._pinned.size else slots_U

    def _lowest(self, over_B: Ints, update: Update) -> Ints:
        slots = np.empty(int(self._counts_B[over_B].sum()), dtype=np.int64)
        first, factor = self.table.buckets[0], np.uint64(self.table.hashes(0, 1)[1] - self.table.hashes(0, 1)[0])
        count = at.lowest(
            self.table.descriptor, over_B, factor, self._counts_B, first, self.clock(update), self._rules,
            self._pinned, self.capacity, self.capacity // _CUT, slots,
        )  # fmt: skip
        return slots[:count]


def capacity_of(table: Table, config: EvictConfig) -> int:
    """Rows of a bucket; 0 = any number. Raises ConfigError where `max_bytes` is too small."""
    if config.max_bytes is None:
        return (config.max_rows or 0) // BUCKETS
    row_bytes = 4 * table.layout.width + INDEX_BYTES
    capacity = int(config.max_bytes / row_bytes / BUCKETS)
    if capacity < LEAST_PER_BUCKET:
        least = math.ceil(LEAST_PER_BUCKET * BUCKETS * row_bytes)
        raise ConfigError(
            f"tables.{table.spec.name}.evict.max_bytes: {config.max_bytes}, rows of {row_bytes:.0f} bytes; allowed: "
            f"{least} or more"
        )
    return capacity
