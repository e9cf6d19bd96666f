"""The synthetic stream: samples of a task, with labels from a planted teacher.

Every sample is a function of (seed, part, row); nothing is stored, so any worker can make any row.
B = rows asked for, T = labels
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Data, Progress, fingerprint
from shardkeep.workers.data.schema import Schema, sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data.sources.synthetic.clicks import DEFAULT_SIZES, Clicks
from shardkeep.workers.data.sources.synthetic.histories import Histories
from shardkeep.workers.data.sources.synthetic.tasks import Chain
from shardkeep.workers.data.sources.synthetic.transitions import Transitions
from shardkeep.workers.data_config import DataConfig, SyntheticConfig, refuse
from shardkeep.workers.model_config import RETRIEVAL, RetrievalSettings

FORMAT = 1  # a new number where equal settings give other samples


class Maker(Protocol):
    """Makes the samples of one task."""

    schema: Schema

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """The samples `rows_B`, and what the teacher knows of them, float64: the logits from which their labels were
        drawn, (B,) or of several (B, T), or the ranks of their items in the best possible lists, (B,)."""
        ...


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
        """The logits of the labels of `rows_B`, as the maker has them: float64."""
        return self._make(rows_B)[1]

    def best_ranks(self, num_samples: int) -> Ints:
        """Of retrieval: the ranks of the first `num_samples` items in the best possible lists, int64."""
        return self._make(np.arange(min(num_samples, self._num_samples)))[1].astype(np.int64)

    def best_auc(self, num_samples: int) -> tuple[float, ...]:
        """For each label the AUC of the teacher's own probabilities on the first `num_samples` rows."""
        count = min(num_samples, self._num_samples)
        parts = [
            self._make(np.arange(start, min(start + 65_536, count), dtype=np.int64))
            for start in range(0, count, 65_536)
        ]
        label_TB = np.concatenate([batch.label_BT for batch, _ in parts]).T
        logit_TB = np.concatenate([logits for _, logits in parts]).reshape(count, -1).T
        return tuple(_auc(*pair) for pair in zip(logit_TB, label_TB, strict=True))

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


def _auc(logit_B: Float64s, label_B: Floats) -> float:
    """On the samples that have the label; nan with one class only."""
    from shardkeep.workers.metrics.quality import auc  # here: the launcher loads no torch

    known_B = ~np.isnan(label_B)
    logit_B, label_B = logit_B[known_B], label_B[known_B]
    return auc(logit_B, label_B) if len(np.unique(label_B)) == 2 else math.nan


def open_synthetic(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `synthetic`. Raises ConfigError for settings that it could only ignore."""
    used = {"source", "root", "synthetic", "fitted"}
    stream = config.synthetic
    used |= {"labels"} if stream.task == "tasks" else set()
    refuse(config, [key for key in DataConfig.model_fields if key not in used], "; allowed: data.synthetic.*")
    maker = partial(Chain, config.labels) if stream.task == "tasks" else _MAKERS[stream.task]
    teacher = _key("teacher", seed)
    train, held = (
        SyntheticDataset(maker(stream, teacher, _key(part, seed)), count)
        for part, count in (("train", stream.train_samples), ("eval", stream.eval_samples))
    )
    plain = {"task"} if stream.task == "clicks" else set()  # the only task of earlier versions
    settings = stream.model_dump(exclude={"train_samples", "eval_samples", *plain})
    settings |= {"synthetic": FORMAT, "seed": seed, "table_sizes": stream.table_sizes or DEFAULT_SIZES}
    if train.schema.tasks:
        settings["labels"] = [task.model_dump(exclude={"loss", "weight"}) for task in train.schema.tasks]
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
    import pyarrow as pa  # type: ignore[import-untyped]  # here: it takes every role 0.25 s

    from shardkeep.workers.data.items import checked, make_catalogue

    sides = sides_of_model(model, data.train.schema)
    return checked(replace(data, catalogue=make_catalogue(data.train, sides, pa.array)), sides)


def _key(name: str, seed: int) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(f"synthetic/{name}".encode(), seed=seed))
