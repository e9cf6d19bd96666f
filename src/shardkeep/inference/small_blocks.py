"""SmallBlocks: scores for a server, whose batches have one row as often as a thousand.

Files and evaluations are scored in blocks of `eval.batch_size` samples, which costs the same for one row as for all.
Here a batch is padded to the smallest block that holds it. The matrix products of another block size may add in another
order, so a score can differ from `Predictor.predict` in its last bits: by less than 1e-6.
"""

# N = samples, P = samples with padding, T = labels

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardkeep.base.arrays import Floats
from shardkeep.inference.trained import Trained
from shardkeep.workers.blocks import DenseModel
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.retrieval.ranking import Best

SIZES = (4, 8, 16, 32, 64, 128, 256)
"""Samples of a block. More samples are several blocks of the largest size."""
TOP_SIZES = (1, 4, 16, 64)
"""As `SIZES`, of users that are compared with all items."""
FEW = 32
"""Blocks up to this size take the form of the dense model for few rows."""


class SmallBlocks:
    """Scores batches of any size. One thread at a time."""

    def __init__(self, trained: Trained, unseen: Unseen) -> None:
        self._trained, self._unseen = trained, unseen
        self._dense = trained.dense
        few = self._dense.for_few_rows() if isinstance(self._dense, Scorer) else None
        self._few: DenseModel = few or self._dense

    def warm(self) -> None:
        """Scores a block of each size, so that the first request waits for no kernel."""
        schema = self._trained.schema
        for size in SIZES:
            one = Ragged(np.zeros(size, np.int64), np.ones(size, np.int32))
            weighted = Ragged(one.values_N, one.lengths_B, np.ones(size, np.float32))
            ids = {f.name: weighted if f.pooling == "weighted" else one for f in schema.looked_up}
            numbers = {group.name: np.zeros((size, len(group.numbers)), np.float32) for group in schema.sequences}
            dense_BI, label_BT = (np.zeros((size, count), np.float32) for count in (schema.num_dense, 1))
            batch = Batch(dense_BI, ids, label_BT, numbers=numbers)
            outputs = self._outputs(batch, 0)
            if self._trained.sides is not None:
                self._trained.finder.top(outputs[:1], batch, 1)

    @property
    def item_values(self) -> Any:
        """The names of a retrieval model's items, an Arrow array; None of any other model. Blocks while the vectors of
        items are computed, the first time."""
        return None if self._trained.sides is None else self._trained.finder.ranking.catalogue.values

    def padded(self, count: int) -> int:
        """The samples of a batch for `scores` where `count` are needed."""
        return next((size for size in SIZES if size >= count), -(-count // SIZES[-1]) * SIZES[-1])

    def scores(self, batch: Batch, count: int) -> Floats:
        """Scores float32 (N, T) of the first `count` of P samples, as of `Predictor.predict`. P is of `padded`."""
        return self._trained.scores(self._outputs(batch, count))[:count]

    def top(self, batch: Batch, count: int, k: int) -> Best:
        """The K best items of the first `count` of P samples, as of `Predictor.top`."""
        size = next((size for size in TOP_SIZES if size >= count), TOP_SIZES[-1])
        return self._trained.finder.top(self._outputs(batch, count)[:count], batch, k, size=size)

    def _outputs(self, batch: Batch, count: int) -> Floats:
        found = self._trained.looked_up(batch)
        embeddings, device, parts = self._trained.embeddings, self._dense.device, []
        for start in range(0, len(batch), SIZES[-1]):
            part = slice(start, min(start + SIZES[-1], len(batch)))
            leaves = embeddings.lookup(found.plan, found.rows, part, device)
            dense_PI = torch.from_numpy(batch.dense_BI[part]).to(device)
            dense = self._few if len(dense_PI) <= FEW else self._dense
            parts.append(dense.predict(dense_PI, embeddings.inputs(found.plan, leaves, part)).cpu().numpy())
        self._unseen.add(found.plan, found.has_row_V, count)
        outputs_PT: Floats = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return outputs_PT
