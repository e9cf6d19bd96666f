"""Transitions of the synthetic stream: which item comes next, by the last one and by popularity.

A sample is a walk of `LENGTH` items and one more within one of `TOPICS`. With a chance of `FOLLOWED` the next item is
the successor of the last one, which is any item of the topic; else it is drawn by Zipf's law among those of the topic.
So the best list begins with the successor and continues by popularity. A model that is trained against the items of
its batch without a correction ranks by likelihood over popularity: it finds the topic and the successor, and has no
order among the others.

B = rows asked for, L = entries of a history
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data_config import SyntheticConfig

ITEMS = 1000
TOPICS = 5
LENGTH = 20
FOLLOWED = 0.5


class Transitions:
    """Makes samples of an item and the history before it."""

    def __init__(self, config: SyntheticConfig, teacher_key: np.uint64, sample_key: np.uint64) -> None:
        self._size = next(iter(config.table_sizes), ITEMS) // TOPICS
        self._zipf, self._numbered = config.zipf, config.ids == "numbered"
        self._keys = teacher_key, sample_key
        seen = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), LENGTH)
        self.schema = Schema((), (Feature("item", "item"),), sequences=(seen,))

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """Samples, and the rank of each item in the best possible list, from 1 on."""
        from shardkeep.workers.data.sources.synthetic.synthetic_kernels import make_transitions

        count = len(rows_B)
        item_B, seen_BL = np.empty(count, np.int64), np.empty((count, LENGTH), np.int64)
        rank_B = np.empty(count, np.float64)
        size, zipf, numbered = self._size, self._zipf, self._numbered
        make_transitions(*self._keys, rows_B, TOPICS, size, zipf, FOLLOWED, numbered, item_B, seen_BL, rank_B)
        ids = {"item": Ragged(item_B), "seen_item": Ragged(seen_BL.reshape(-1), np.full(count, LENGTH, np.int32))}
        return Batch(np.zeros((count, 0), np.float32), ids, np.ones((count, 1), np.float32)), rank_B
