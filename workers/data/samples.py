"""Dataset, the one thing every source provides, and Data, a job's two of them. No source is known here.

B = rows asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.errors import DataError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Schema

MEAN_SAMPLES = 1 << 18
Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, in [0, 1]."""


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read in any order, by any number of threads at once."""

    @property
    def schema(self) -> Schema:
        """The columns of every batch."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def gather(self, rows_B: NDArray[np.int64]) -> Batch:
        """The samples `rows_B` (int64, each in [0, len)), in that order, in fresh arrays that the caller may keep.

        Raises IndexError where a row is out of range. Blocks for reading only.
        """
        ...


def gathered(dataset: Dataset, rows_B: NDArray[np.int64]) -> Batch:
    """`dataset.gather`. Raises DataError if the labels are not (B, T): a dataset of the user's own can be wrong."""
    batch, names = dataset.gather(rows_B), dataset.schema.labels
    if batch.label_BT.shape != (expected := (rows_B.size, len(names))):
        raise DataError(
            f"the dataset's gather returned labels {batch.label_BT.shape}; "
            f"expected {expected}: its schema has the labels {', '.join(names)}"
        )
    return batch


@dataclass(frozen=True)
class Data:
    """A job's samples.

    Attributes:
        train: what training visits.
        eval: what evaluation visits; None = nothing to evaluate on. Its schema equals train's.
        best_auc: of the synthetic stream only: the teacher's own AUC on the first n samples of eval.
        source: where it comes from, in a few words, for a person.
        fingerprint: a short hash of the samples' content, the same at another path or time; training and evaluation
            samples apart, with a hyphen between. Of a source of the user's own, what the source says of itself.
        inputs: how raw columns become inputs, as JSON types (conversion/inputs.py); None = not known.
        notes: what a person should know of the columns, a line each.
    """

    train: Dataset
    eval: Dataset | None = None
    best_auc: Callable[[int], float] | None = None
    source: str = ""
    fingerprint: str = ""
    inputs: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def label_means(self) -> tuple[float, ...]:
        """The mean of each training label by the samples' weights. Reads up to `MEAN_SAMPLES`, spread over all."""
        rows_N = np.linspace(0, len(self.train) - 1, min(len(self.train), MEAN_SAMPLES)).astype(np.int64)
        batch = gathered(self.train, rows_N)
        weights_N = batch.weight_B if batch.weight_B is not None and batch.weight_B.any() else None
        return tuple(np.average(batch.label_BT.astype(np.float64), axis=0, weights=weights_N).tolist())

    def describe(self) -> str:
        """One line: how many samples, columns and features, and where from."""
        schema = self.train.schema
        held = f" + {len(self.eval):,} for evaluation" if self.eval is not None else ", none for evaluation"
        columns = f"{_counted(schema.num_dense, 'dense column')}, {_counted(len(schema.features), 'feature')}"
        return f"{len(self.train):,} samples{held}; {columns}; {self.source}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
