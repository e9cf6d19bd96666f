"""The synthetic stream: a planted teacher, and for clicks, in Criteo's shape, Zipf ids and bell-shaped dense columns.

Every sample is a function of (seed, part, row); nothing is stored, so any worker can make any row.
B = rows asked for, I = dense columns, F = features
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import Data, Progress, fingerprint
from shardkeep.workers.data.schema import Feature, Schema, sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data.sources.synthetic_histories import Histories
from shardkeep.workers.data.sources.synthetic_transitions import Transitions
from shardkeep.workers.data_config import DataConfig, SyntheticConfig, refuse
from shardkeep.workers.model_config import RETRIEVAL, RetrievalSettings

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


FORMAT = 1  # a new number where equal settings give other samples


class Maker(Protocol):
    """Makes the samples of one task."""

    schema: Schema

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """The samples `rows_B`, and what the teacher knows of them, float64 (B,): the logits from which their labels
        were drawn, or the ranks of their items in the best possible lists."""
        ...


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
        from shardkeep.workers.data.sources.synthetic_kernels import make_samples  # here: the launcher makes no samples

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


class SyntheticDataset:
    """A part of the stream: `num_samples` rows."""

    def __init__(self, maker: Maker, num_samples: int) -> None:
        self._maker = maker
        self._num_samples = num_samples

    @property
    def schema(self) -> Schema:
        return self._maker.schema

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, rows_B: NDArray[np.int64]) -> Batch:
        return self._make(rows_B)[0]

    def teacher_logits(self, rows_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits that the labels of `rows_B` were drawn from: float64."""
        return self._make(rows_B)[1]

    def best_ranks(self, num_samples: int) -> Ints:
        """Of retrieval: the ranks of the first `num_samples` items in the best possible lists, int64."""
        return self._make(np.arange(min(num_samples, self._num_samples)))[1].astype(np.int64)

    def best_auc(self, num_samples: int) -> float:
        """The AUC of the teacher's own probabilities on the first `num_samples` rows; nan with one class only."""
        from shardkeep.workers.metrics.quality import auc  # here: the launcher loads no torch

        count = min(num_samples, self._num_samples)
        parts = [
            self._make(np.arange(start, min(start + 65_536, count), dtype=np.int64))
            for start in range(0, count, 65_536)
        ]
        labels = np.concatenate([batch.label_BT[:, 0] for batch, _ in parts])
        logits = np.concatenate([logit_B for _, logit_B in parts])
        return auc(logits, labels) if labels.min() < labels.max() else math.nan

    def _make(self, rows_B: NDArray[np.int64]) -> tuple[Batch, Float64s]:
        rows_B = np.ascontiguousarray(rows_B, np.int64)
        if len(rows_B) and not 0 <= rows_B.min() <= rows_B.max() < self._num_samples:
            raise IndexError(f"a row is outside [0, {self._num_samples})")
        return self._maker.make(rows_B)


_MAKERS: dict[str, Callable[[SyntheticConfig, np.uint64, np.uint64], Maker]] = {
    "clicks": Clicks,
    "sequences": Histories,
    "retrieval": Transitions,
}


def open_synthetic(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `synthetic`. Raises ConfigError for settings that it could only ignore."""
    used = {"source", "root", "synthetic", "fitted"}
    refuse(config, [key for key in DataConfig.model_fields if key not in used], "; allowed: data.synthetic.*")
    stream = config.synthetic
    maker, teacher = _MAKERS[stream.task], _key("teacher", seed)
    train, held = (
        SyntheticDataset(maker(stream, teacher, _key(part, seed)), count)
        for part, count in (("train", stream.train_samples), ("eval", stream.eval_samples))
    )
    plain = {"task"} if stream.task == "clicks" else set()  # the only task of earlier versions
    settings = stream.model_dump(exclude={"train_samples", "eval_samples", *plain})
    settings |= {"synthetic": FORMAT, "seed": seed, "table_sizes": stream.table_sizes or DEFAULT_SIZES}
    mark = fingerprint(settings | {"rows": len(train)}, settings | {"rows": len(held)})
    inputs = sample_inputs(train.schema, frozenset())
    data = Data(train, held, held.best_auc, "made on the fly", mark, inputs)
    if stream.task == "retrieval":
        if items is None:
            allowed = ", ".join(RETRIEVAL)
            raise ConfigError(f"data.synthetic.task: retrieval has no labels; allowed with model.name: {allowed}")
        data = replace(data, best_auc=None, best_ranks=held.best_ranks, inputs={**(inputs or {}), "label": None})
    return data if items is None else _with_catalogue(data, items)


def _with_catalogue(data: Data, model: RetrievalSettings) -> Data:
    """The data with the items of the training samples, whose values are their ids."""
    from shardkeep.workers.data.items import as_values, checked, make_catalogue  # here: pyarrow takes every role 0.25 s

    sides = sides_of_model(model, data.train.schema)
    return checked(replace(data, catalogue=make_catalogue(data.train, sides, as_values)), sides)


def _key(name: str, seed: int) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(f"synthetic/{name}".encode(), seed=seed))
