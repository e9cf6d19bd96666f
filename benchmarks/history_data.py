"""Clicks with histories as a data source of shardkeep's (`data.source: history_data:ready`): batches ready in memory.

A sample has an item and a history of as many items as it may have, of Zipf's law; the label is any. With
`order: stored` a step's samples lie side by side, so that `gather` hands out views and costs next to nothing.
"""

# S = samples, L = entries of a history

from __future__ import annotations

from typing import Any

import numpy as np
import workload

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns

ITEMS, NUM_BATCHES = 100_000, 16


def schema_of(length: int) -> Schema:
    seen = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), length)
    return Schema((), (Feature("item", "item"),), sequences=(seen,))


def ready(*, split: str, batch: int, length: int, num_batches: int = NUM_BATCHES, seed: int = 1) -> Ready | None:
    """The contract of docs/guide/data.md; there is nothing to evaluate on."""
    return Ready(num_batches * batch, length, seed) if split == "train" else None


class Ready:
    """Samples in memory."""

    def __init__(self, samples: int, length: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        ids_SL = workload.draw_ids(1, seed=seed, batch=samples * (length + 1), sizes=(ITEMS,)).reshape(samples, -1)
        self.item_S, self.seen_SL = ids_SL[:, 0].copy(), ids_SL[:, 1:].copy()
        self.label_S1 = (random.random((samples, 1)) < 0.25).astype(np.float32)
        self.schema = schema_of(length)

    def __len__(self) -> int:
        return len(self.label_S1)

    def gather(self, rows_B: Any) -> Batch:
        """Consecutive samples, as views that nobody writes to."""
        part = slice(int(rows_B[0]), int(rows_B[-1]) + 1)
        lengths_B = np.full(len(rows_B), self.seen_SL.shape[1], np.int32)
        ids = {"item": Ragged(self.item_S[part]), "seen_item": Ragged(self.seen_SL[part].reshape(-1), lengths_B)}
        return Batch(np.empty((len(rows_B), 0), np.float32), ids, self.label_S1[part])
