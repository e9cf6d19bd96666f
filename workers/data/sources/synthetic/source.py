"""The synthetic stream: clicks in Criteo's shape, with Zipf ids, bell-shaped dense columns and a planted teacher.

Every sample is a function of (seed, part, row); nothing is stored, so any worker can make any row.
B = rows asked for, I = dense columns, F = features
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xxhash

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import Data, Progress, fingerprint
from shardkeep.workers.data.schema import Feature, Schema, sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data_config import DataConfig, SyntheticConfig, refuse
from shardkeep.workers.model_config import RetrievalSettings

FORMAT = 1  # a new number where equal settings give other samples
# The teacher. Few, frequent ids carry most of the signal, because nobody can learn the effect of an id seen twice; the
# features with the smallest tables interact. Chosen so that on the default stream a logistic regression stays 0.02
# AUC and more behind, and a DLRM is within 0.02 after 1.3 M samples; test_synthetic.py measures both.
BIAS = -1.0
DENSE_STRENGTH = 1.44  # standard deviation of the dense term
ID_STRENGTH = 1.02  # of the id effects' sum, were all ids the most popular ones
FACTOR_STRENGTH = 0.75  # of each of an id's two factors, in the features that interact
NUM_INTERACTING = 6
ID_HALF_RANK = 10.0  # the effect of the id with this rank is half that of the most popular one
FACTOR_HALF_RANK = 5.0
# Criteo's mixture: some tables of a hundred ids, some of a million.
DEFAULT_SIZES = tuple(round(100 * 10 ** (4 * f / 25)) for f in range(26))


class SyntheticDataset:
    """A part of the stream: `num_samples` rows. The keys are those of the teacher and of the part."""

    def __init__(
        self, config: SyntheticConfig, teacher_key: np.uint64, sample_key: np.uint64, num_samples: int
    ) -> None:
        size_F = np.array(config.table_sizes or DEFAULT_SIZES, np.int64)
        shares = (DENSE_STRENGTH / math.sqrt(max(1, config.num_dense)), ID_STRENGTH / math.sqrt(len(size_F)))
        strength, factor_F = np.array([BIAS, *shares, ID_HALF_RANK, FACTOR_HALF_RANK]), np.zeros(len(size_F))
        factor_F[np.argsort(size_F, kind="stable")[:NUM_INTERACTING]] = FACTOR_STRENGTH
        self._keys, self._num_samples = (teacher_key, sample_key), num_samples
        self._stream = size_F, config.zipf, config.ids == "numbered", strength, factor_F
        features = tuple(Feature(f"C{f + 1}", f"C{f + 1}") for f in range(len(size_F)))
        self.schema = Schema(tuple(f"I{i + 1}" for i in range(config.num_dense)), features)

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, rows_B: Ints) -> Batch:
        return self.drawn(rows_B)[0]

    def best_auc(self, num_samples: int) -> tuple[float]:
        """The AUC of the teacher's own probabilities on the first `num_samples` rows; nan with one class only."""
        from shardkeep.workers.metrics.quality import auc  # here: the launcher loads no torch

        count = min(num_samples, self._num_samples)
        parts = [self.drawn(np.arange(at, min(at + 65_536, count), dtype=np.int64)) for at in range(0, count, 65_536)]
        label_B = np.concatenate([batch.label_BT[:, 0] for batch, _ in parts])
        logit_B = np.concatenate([logits for _, logits in parts])
        return (auc(logit_B, label_B) if len(np.unique(label_B)) == 2 else math.nan,)

    def drawn(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """The samples `rows_B`, and the teacher's logits, from which their labels are drawn: float64 (B,)."""
        from shardkeep.workers.data.sources.synthetic.synthetic_kernels import make_samples  # here: not in the launcher

        rows_B = np.ascontiguousarray(rows_B, np.int64)
        if len(rows_B) and not 0 <= rows_B.min() <= rows_B.max() < self._num_samples:
            raise IndexError(f"a row is outside [0, {self._num_samples})")
        dense_BI = np.empty((len(rows_B), self.schema.num_dense), np.float32)
        ids_FB = np.empty((len(self.schema.features), len(rows_B)), np.int64)
        label_B, logit_B = np.empty(len(rows_B), np.float32), np.empty(len(rows_B), np.float64)
        given: tuple[Any, ...] = (*self._keys, rows_B, *self._stream, dense_BI, ids_FB, label_B, logit_B)
        make_samples(*given)
        ids = {feature.name: Ragged(ids_FB[f]) for f, feature in enumerate(self.schema.features)}
        return Batch(dense_BI, ids, label_B[:, None]), logit_B


def open_synthetic(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `synthetic`. Raises ConfigError for settings that it could only ignore."""
    used = {"source", "root", "synthetic", "fitted", "shuffle"}
    refuse(config, [key for key in DataConfig.model_fields if key not in used], "; allowed: data.synthetic.*")
    stream, teacher = config.synthetic, _key("teacher", seed)
    train, held = (
        SyntheticDataset(stream, teacher, _key(part, seed), count)
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
