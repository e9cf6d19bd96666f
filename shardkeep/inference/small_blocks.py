"""SmallBlocks: scores for a server, whose batches have one row as often as a thousand.

Files and evaluations are scored in blocks of `eval.batch_size` samples, which costs the same for one row as for all.
Here a batch is padded to the smallest block that holds it. The matrix products of another block size may add in another
order, so a score can differ from `Predictor.predict` in its last bits: by less than 1e-6.
"""

# N = samples, T = labels

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats
from shardkeep.inference.trained import Trained
from shardkeep.workers.blocks import Blocks
from shardkeep.workers.data.batch import Batch

SIZES = (16, 64, 256, 1024)
"""Samples of a block."""


class SmallBlocks:
    """Scores batches of any size. One thread at a time."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._blocks = [Blocks(trained.embeddings, trained.dense, size) for size in SIZES]

    def scores(self, batch: Batch) -> Floats:
        """Scores float32 (N, T) of a batch of 1 sample or more, as of `Predictor.predict`."""
        found = self._trained.looked_up(batch)
        parts, start = [], 0
        while start < len(batch):
            missing = len(batch) - start
            blocks = next((each for each in self._blocks if each.size >= missing), self._blocks[-1])
            part = slice(start, min(start + blocks.size, len(batch)))
            parts.append(blocks.logits(batch.slice(part.start, part.stop), found.plan, found.rows, part))
            start = part.stop
        return self._trained.scores(parts[0] if len(parts) == 1 else np.concatenate(parts))
