"""Small data sets in memory, drawn from a seed, for integration tests."""

from __future__ import annotations

import numpy as np

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Feature, Schema


class ArrayDataset:
    """Samples held in arrays. `ids[feature]` is (values_N, offsets of length B + 1, weights_N or None)."""

    def __init__(self, schema: Schema, dense, ids, label) -> None:
        self.schema = schema
        self._dense, self._ids, self._label = dense, ids, label

    def __len__(self) -> int:
        return len(self._label)

    def gather(self, rows_B: np.ndarray) -> Batch:
        ids = {}
        for feature in self.schema.features:
            values, offsets, weights = self._ids[feature.name]
            spans = [np.arange(offsets[r], offsets[r + 1]) for r in rows_B]
            where = np.concatenate(spans) if spans else np.empty(0, np.int64)
            lengths = np.diff(offsets)[rows_B].astype(np.int32)
            single = feature.pooling == "sum" and weights is None and (np.diff(offsets) == 1).all()
            ids[feature.name] = Ragged(
                values[where], None if single else lengths, None if weights is None else weights[where]
            )
        return Batch(self._dense[rows_B], ids, self._label[rows_B])


def draw(
    num_samples: int,
    *,
    seed: int = 0,
    num_dense: int = 3,
    pooling: str = "sum",
    vocabulary: int = 40,
    multi: bool = True,
    shared: bool = True,
) -> ArrayDataset:
    """A data set with three features: `a` (one id each), `b` (0 to 4 ids) and `c`, which shares b's table."""
    rng = np.random.default_rng(seed)
    schema = Schema(
        tuple(f"d{i}" for i in range(num_dense)),
        (Feature("a", "a"), Feature("b", "b", pooling), Feature("c", "b" if shared else "c", pooling)),
    )
    ids = {}
    for feature in schema.features:
        lengths = rng.integers(0, 5, num_samples) if multi and feature.name != "a" else np.ones(num_samples, int)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = rng.integers(-vocabulary, vocabulary, offsets[-1]) * 0x1234567890AB
        weights = rng.uniform(0.5, 2.0, offsets[-1]).astype(np.float32) if feature.pooling == "weighted" else None
        ids[feature.name] = (values.astype(np.int64), offsets, weights)
    dense = rng.normal(size=(num_samples, num_dense)).astype(np.float32)
    label = (rng.random((num_samples, 1)) < 0.4).astype(np.float32)
    return ArrayDataset(schema, dense, ids, label)


def as_data(train: ArrayDataset, held_out: ArrayDataset | None = None) -> Data:
    return Data(train=train, eval=held_out)
