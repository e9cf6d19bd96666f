"""Clicks of the synthetic stream, in Criteo's shape: Zipf ids, bell-shaped dense columns, and a planted teacher.

B = rows asked for, I = dense columns, F = features
"""

from __future__ import annotations

import math

import numpy as np

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.data_config import SyntheticConfig

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


class Clicks:
    """Makes samples in Criteo's shape."""

    def __init__(self, config: SyntheticConfig, teacher_key: np.uint64, sample_key: np.uint64) -> None:
        sizes = tuple(config.table_sizes) or DEFAULT_SIZES
        self._sizes_F = np.array(sizes, np.int64)
        self._zipf = config.zipf
        self._numbered = config.ids == "numbered"
        self._teacher_key, self._sample_key = teacher_key, sample_key
        self._strength = np.array(
            [
                BIAS,
                DENSE_STRENGTH / math.sqrt(max(1, config.num_dense)),
                ID_STRENGTH / math.sqrt(len(sizes)),
                ID_HALF_RANK,
                FACTOR_HALF_RANK,
            ]
        )
        self._factor_F = np.zeros(len(sizes))
        self._factor_F[np.argsort(self._sizes_F, kind="stable")[:NUM_INTERACTING]] = FACTOR_STRENGTH
        features = tuple(Feature(f"C{f + 1}", f"C{f + 1}") for f in range(len(sizes)))
        self.schema = Schema(tuple(f"I{i + 1}" for i in range(config.num_dense)), features)

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        from shardkeep.workers.data.sources.synthetic.synthetic_kernels import (
            make_samples,
        )  # here: the launcher makes no samples

        dense_BI = np.empty((len(rows_B), self.schema.num_dense), np.float32)
        ids_FB = np.empty((len(self._sizes_F), len(rows_B)), np.int64)
        label_B = np.empty(len(rows_B), np.float32)
        logit_B = np.empty(len(rows_B), np.float64)
        make_samples(
            self._teacher_key,
            self._sample_key,
            rows_B,
            self._sizes_F,
            self._zipf,
            self._numbered,
            self._strength,
            self._factor_F,
            dense_BI,
            ids_FB,
            label_B,
            logit_B,
        )
        ids = {feature.name: Ragged(ids_FB[f]) for f, feature in enumerate(self.schema.features)}
        return Batch(dense_BI, ids, label_B[:, None]), logit_B
