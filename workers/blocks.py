"""Blocks: the one way in which samples are scored, in evaluation, `evaluate`, `predict` and `Predictor`.

Every block has the same number of samples, and zeros fill the last one; the entries of sequences become a multiple of a
number by zeros, too. So the bits of a sample depend neither on the samples beside it nor on its place (`amp: off`, one
type of CPU).
"""

# B = samples of a batch, P = samples of a block, T = labels, U = unique ids of a table, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from shardkeep.base.arrays import Floats, Rows
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.embeddings.inputs import Inputs, pad_rows, padded, spare_samples
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan

_MULTIPLE = 16
"""Of the size of a block: vector loops of torch compute a remainder in another way."""


class DenseModel(Protocol):
    """A dense model that is only read."""

    @property
    def device(self) -> torch.device:
        """Where its inputs must be."""
        ...

    def predict(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """Logits (B, T) in float32 without gradients."""
        ...


class BlockScorer:
    """Scores batches of up to `size` samples with a dense model and rows as they are now."""

    def __init__(self, embeddings: Embeddings, dense: DenseModel, size: int) -> None:
        self.size = size
        self.embeddings = embeddings
        self.dense = dense
        self._padded = -(-(size + spare_samples(embeddings.sequences.values())) // _MULTIPLE) * _MULTIPLE

    def logits(self, batch: Batch, plan: Plan, rows: Mapping[str, Rows], part: slice | None = None) -> Floats:
        """Logits float32 (B, T) of a batch of 1 to `size` samples.

        Args:
            plan: The batch's, or that of a larger one.
            rows: Per table the values of the plan's unique ids, float32 (U, D).
            part: Where the batch is in the larger one; None = all of it."""
        if not 0 < len(batch) <= self.size:
            raise ValueError(f"{len(batch)} samples; allowed: 1 to {self.size}")
        device, missing = self.dense.device, self._padded - len(batch)
        leaves = self.embeddings.lookup(plan, rows, part=part, device=device)
        inputs, dense_PI = self.embeddings.inputs(plan, leaves, part), torch.from_numpy(batch.dense_BI).to(device)
        if missing:
            inputs, dense_PI = padded(inputs, missing), pad_rows(dense_PI, missing)
        logits_BT: Floats = self.dense.predict(dense_PI, inputs)[: len(batch)].detach().cpu().numpy()  # maybe a leaf
        return logits_BT
