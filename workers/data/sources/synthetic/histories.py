"""Histories of the synthetic stream: does a sample's category occur among the 30 in its history?

A sum of rows, in which an entry counts alike for every target, can hardly tell; attention can.

B = rows asked for
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data_config import SyntheticConfig

CATEGORIES = 500
LENGTH = 30
STRENGTH = 2.0
"""The logit of a sample whose category occurs; its negative is that of any other: chances of 0.88 and 0.12."""


class Histories:
    """Makes samples of one category and a history of as many categories as `LENGTH`, drawn alike. In half of the
    samples the category is put at a random place of the history."""

    def __init__(self, config: SyntheticConfig, teacher_key: np.uint64, sample_key: np.uint64) -> None:
        self._size = next(iter(config.table_sizes), CATEGORIES)
        self._numbered = config.ids == "numbered"
        self._keys = teacher_key, sample_key
        seen = SequenceColumns("seen", (Feature("seen_category", "category", "none"),), (), LENGTH)
        self.schema = Schema((), (Feature("category", "category"),), sequences=(seen,))

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """Samples and their logits."""
        from shardkeep.workers.data.sources.synthetic.synthetic_kernels import make_histories

        count = len(rows_B)
        target_B, seen_BL = np.empty(count, np.int64), np.empty((count, LENGTH), np.int64)
        label_B, logit_B = np.empty(count, np.float32), np.empty(count, np.float64)
        (teacher, samples), size, numbered = self._keys, self._size, self._numbered
        make_histories(teacher, samples, rows_B, size, numbered, STRENGTH, target_B, seen_BL, label_B, logit_B)
        lengths_B = np.full(count, LENGTH, np.int32)
        ids = {"category": Ragged(target_B), "seen_category": Ragged(seen_BL.reshape(-1), lengths_B)}
        return Batch(np.zeros((count, 0), np.float32), ids, label_B[:, None]), logit_B
