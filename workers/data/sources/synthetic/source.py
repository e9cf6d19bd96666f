"""The synthetic stream: clicks, with labels from a planted teacher.

Every sample is a function of (seed, part, row); nothing is stored, so any worker can make any row.
B = rows asked for
"""

from __future__ import annotations

import math

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Data, Progress, fingerprint
from shardkeep.workers.data.schema import Schema, sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data.sources.synthetic.clicks import DEFAULT_SIZES, Clicks
from shardkeep.workers.data_config import DataConfig, refuse
from shardkeep.workers.model_config import RetrievalSettings

FORMAT = 1  # a new number where equal settings give other samples


class SyntheticDataset:
    """A part of the stream: `num_samples` rows."""

    def __init__(self, clicks: Clicks, num_samples: int) -> None:
        self._clicks = clicks
        self._num_samples = num_samples

    @property
    def schema(self) -> Schema:
        return self._clicks.schema

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, rows_B: NDArray[np.int64]) -> Batch:
        return self._make(rows_B)[0]

    def teacher_logits(self, rows_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits from which the labels of `rows_B` were drawn: float64 (B,)."""
        return self._make(rows_B)[1]

    def best_auc(self, num_samples: int) -> tuple[float]:
        """The AUC of the teacher's own probabilities on the first `num_samples` rows; nan with one class only."""
        from shardkeep.workers.metrics.quality import auc  # here: the launcher loads no torch

        count = min(num_samples, self._num_samples)
        parts = [self._make(np.arange(at, min(at + 65_536, count), dtype=np.int64)) for at in range(0, count, 65_536)]
        label_B = np.concatenate([batch.label_BT[:, 0] for batch, _ in parts])
        logit_B = np.concatenate([logits for _, logits in parts])
        return (auc(logit_B, label_B) if len(np.unique(label_B)) == 2 else math.nan,)

    def _make(self, rows_B: NDArray[np.int64]) -> tuple[Batch, NDArray[np.float64]]:
        rows_B = np.ascontiguousarray(rows_B, np.int64)
        if len(rows_B) and not 0 <= rows_B.min() <= rows_B.max() < self._num_samples:
            raise IndexError(f"a row is outside [0, {self._num_samples})")
        return self._clicks.make(rows_B)


def open_synthetic(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `synthetic`. Raises ConfigError for settings that it could only ignore."""
    used = {"source", "root", "synthetic", "fitted"}
    refuse(config, [key for key in DataConfig.model_fields if key not in used], "; allowed: data.synthetic.*")
    stream, teacher = config.synthetic, _key("teacher", seed)
    train, held = (
        SyntheticDataset(Clicks(stream, teacher, _key(part, seed)), count)
        for part, count in (("train", stream.train_samples), ("eval", stream.eval_samples))
    )
    settings = stream.model_dump(exclude={"train_samples", "eval_samples"})
    settings |= {"synthetic": FORMAT, "seed": seed, "table_sizes": stream.table_sizes or DEFAULT_SIZES}
    mark = fingerprint(settings | {"rows": len(train)}, settings | {"rows": len(held)})
    data = Data(train, held, "made on the fly", mark, sample_inputs(train.schema, frozenset()))
    if items is None:
        return data
    from shardkeep.workers.data.items import catalogued  # here: pyarrow takes every role 0.25 s

    return catalogued(data, sides_of_model(items, train.schema))


def _key(name: str, seed: int) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(f"synthetic/{name}".encode(), seed=seed))
