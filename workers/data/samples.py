"""Dataset, the one thing every source provides, and Data, a job's own of them, with their fingerprint and doubts about
their weights. No source is known here.

B = rows asked for
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Bools, Float64s, Floats
from shardkeep.base.errors import DataError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.label_config import LossConfig
from shardkeep.workers.split_config import RANDOM, TIME, SplitConfig

if TYPE_CHECKING:
    from shardkeep.workers.data.catalogue import Catalogue
    from shardkeep.workers.data_config import DataConfig

MEAN_SAMPLES, SHARE_SAMPLES = 1 << 18, 1 << 16
"""Samples of which the mean of a label is taken, for a model's bias and for a line."""
SIDES = ("training", "evaluation", "the test")
FAR, OFF, BEYOND = 1.5, 0.2, 3.5
"""A side has so many times its share of the rows; a mean differs by this share from that of training, and by so many
standard errors."""
LARGEST_RMS = 10.0
"""Root mean square of a feature's weights above which there is a warning: so many times as long are its pooled rows, as
those of different ids are nearly orthogonal. Ratings of 1 to 5 have 3.3."""
_WEIGHT_SAMPLES = 1024
Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, in [0, 1]."""


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read in any order, by any number of threads at once.

    Where the best possible figures are known, evaluation data may have two more methods: `best_auc(n)` returns the best
    AUC of each label on the first n samples, and `best_ranks(n)` the ranks of their items in the best lists, from 1 on.
    """

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


@runtime_checkable
class ReadsAhead(Protocol):
    """A data set whose samples lie in files that may be larger than memory."""

    def prefetch(self, start: int, stop: int) -> None:
        """Has the system read the samples [start, stop), which are gathered soon; does not wait. From the first call
        on, a sample that no call has named is read without its neighbours."""
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


def batches(dataset: Dataset, size: int) -> Iterator[Batch]:
    """The samples in order, in batches of `size`; the last one may have fewer. Raises DataError as `gathered`."""
    for start in range(0, len(dataset), size):
        yield gathered(dataset, np.arange(start, min(start + size, len(dataset))))


def empty_sample(schema: Schema) -> Batch:
    """One sample of zeros without ids, for a rank that has none in a step: the reduction needs every rank."""
    empty = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32))
    weighted = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32), np.empty(0, np.float32))
    ids = {f.name: weighted if f.pooling == "weighted" else empty for f in schema.looked_up}
    numbers = {group.name: np.empty((0, len(group.numbers)), np.float32) for group in schema.sequences}
    dense_BI, label_BT = (np.zeros((1, count), np.float32) for count in (schema.num_dense, len(schema.labels)))
    return Batch(dense_BI, ids, label_BT, numbers=numbers)


@dataclass(frozen=True)
class Side:
    """Labels of one side of a split, float64 (N, T), NaN = none, and its samples' weights. `groups`: how many of these
    are independent, such as users."""

    label_NT: Float64s
    weight_N: Floats | None = None
    groups: int = 1

    @cached_property
    def means(self) -> tuple[float, ...]:
        """The mean of each label by the weights, over the samples that have the label."""
        if not np.isnan(self.label_NT).any():
            return tuple(np.average(self.label_NT, axis=0, weights=self.weight_N).tolist())
        return tuple(self.mean(t, ~np.isnan(self.label_NT[:, t])) for t in range(self.label_NT.shape[1]))

    def mean(self, t: int, own_N: Bools) -> float:
        """That of label t over the samples `own_N`; 0 where there are none, or all weigh nothing."""
        weight_N = own_N if self.weight_N is None else self.weight_N * own_N
        return float(np.average(self.label_NT[own_N, t], weights=weight_N[own_N])) if weight_N.any() else 0.0


def label_lines(labels: Sequence[str], sides: Mapping[str, Side], by: str, time: str | None) -> list[str]:
    """The mean of each label on each side, training first, in one line; and a question for one that is far off beyond
    chance. `by`: what they were split by; "" = files. `time`: `data.time`."""
    parts, questions, (train, *others) = list[str](), list[str](), sides.values()
    for t, label in enumerate(labels):
        label_N, base = train.label_NT[:, t], train.means[t]
        what = "share" if np.isin(label_N[~np.isnan(label_N)], (0.0, 1.0)).all() else "mean"
        parts.append(f"{label}: {what} " + ", ".join(f"{side.means[t]:.3g} in {name}" for name, side in sides.items()))
        errors = [np.nanstd(label_N) * np.sqrt(1 / side.groups + 1 / train.groups) for side in others]
        far = (abs(o.means[t] - base) > max(OFF * abs(base), BEYOND * e) for o, e in zip(others, errors, strict=True))
        if any(far):
            why = f"does {time} change with it? Then set another data.time, or data.split: random"
            questions.append(f"{parts[-1]}; {why if by == TIME else 'are these rows of another kind?'}")
    how = {TIME: f"; split by time ({time})", RANDOM: "; split at random, not by time", "": ""}
    return ["; ".join(parts) + how.get(by, f"; split by {by}, not by time"), *questions]


@dataclass(frozen=True)
class Data:
    """A job's samples.

    Attributes:
        train: what training visits.
        eval: what evaluation visits; None = nothing to evaluate on. Its schema equals train's.
        source: where it comes from, in a few words, for a person.
        fingerprint: a short hash of the samples' content, the same at another path or time; training and evaluation
            samples apart, with a hyphen between. Of a source of the user's own, what the source says of itself.
        inputs: how raw columns become inputs, as JSON types (fitting/inputs.py); None = not known.
        notes: what a person should know of the columns, a line each.
        catalogue: the items of a retrieval job; None of any other.
        test: what `data.split` holds out for the test; None = nothing.
        stored_bytes: size of the files in which the training samples lie; 0 = in none.
    """

    train: Dataset
    eval: Dataset | None = None
    source: str = ""
    fingerprint: str = ""
    inputs: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    catalogue: Catalogue | None = None
    test: Dataset | None = None
    stored_bytes: int = 0

    @property
    def label_means(self) -> tuple[float, ...]:
        """The mean of each training label by the samples' weights, over those that have the label."""
        return self._trained.means

    def means_of_numbers(self, loss: LossConfig) -> tuple[float, ...]:
        """`label_means` where a label is a number by its loss, or by that of the job; else ()."""
        losses = [task.objective for task in self.train.schema.tasks] or [loss]
        return self.label_means if any(each.of_numbers for each in losses) else ()

    @cached_property
    def conditional_means(self) -> tuple[float, ...]:
        """As `label_means`; of a label `after` another one over the samples where that one is 1."""
        means, names, train = list(self.label_means), self.train.schema.labels, self._trained
        for t, task in enumerate(self.train.schema.tasks):
            if task.after is not None:
                before_N = train.label_NT[:, names.index(task.after)] == 1.0
                means[t] = train.mean(t, before_N & ~np.isnan(train.label_NT[:, t]))
        return tuple(means)

    @cached_property
    def _trained(self) -> Side:
        return _side_of(self.train, MEAN_SAMPLES)

    def describe(self) -> str:
        """One line: how many samples, columns and features, and where from."""
        schema = self.train.schema
        held = f" + {len(self.eval):,} for evaluation" if self.eval is not None else ", none for evaluation"
        held += f" + {len(self.test):,} for the test" if self.test is not None else ""
        columns = f"{_counted(schema.num_dense, 'dense column')}, {_counted(len(schema.features), 'feature')}"
        columns += f", {_counted(len(schema.sequences), 'sequence')}" if schema.sequences else ""
        return f"{len(self.train):,} samples{held}; {columns}; {self.source}"

    def remarks(self, config: DataConfig) -> list[str]:
        """Lines about the sides of a split: the means of the labels that `config` names, questions, and `uneven`."""
        by = config.split.by if config.split is not None else ""
        lines = [] if config.split is None else [*filter(None, [self.uneven(config.split)])]
        if config.targets:
            parts = zip(SIDES, (self.train, self.eval, self.test), strict=True)
            sides = {name: _side_of(part, SHARE_SAMPLES, by) for name, part in parts if part is not None}
            lines = [*label_lines(self.train.schema.labels, sides, by, config.time), *lines]
        return lines

    def uneven(self, split: SplitConfig) -> str:
        """One line where a side has `FAR` times its share of the rows, or so much less; "" = none has."""
        sides = {"evaluation": (self.eval or (), split.eval), "the test": (self.test or (), split.test)}
        total = len(self.train) + sum(len(side) for side, _ in sides.values())
        shares = {name: (len(side) / total, named) for name, (side, named) in sides.items() if named}
        if all(named / FAR <= share <= named * FAR for share, named in shares.values()):
            return ""
        told = [f"{name} has {share:.1%} of the rows, not {named:.0%}" for name, (share, named) in shares.items()]
        return f"data.split by {split.by}: {', '.join(told)}; equal values stay together"


def _side_of(dataset: Dataset, most: int, by: str = "") -> Side:
    """Labels of up to `most` samples, spread over all. `by`: the feature whose values are the groups."""
    rows_N = _spread(dataset, most)
    batch = gathered(dataset, rows_N)
    ids = batch.ids[by].values_N if by in batch.ids and batch.ids[by].lengths_B is None else rows_N
    weight_N = batch.weight_B if batch.weight_B is not None and batch.weight_B.any() else None
    return Side(batch.label_BT.astype(np.float64), weight_N, len(np.unique(ids)))


def _spread(dataset: Dataset, most: int) -> NDArray[np.int64]:
    """Up to `most` rows from all over a data set."""
    return np.linspace(0, len(dataset) - 1, min(len(dataset), most)).astype(np.int64)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def fingerprint(*parts: Mapping[str, Any]) -> str:
    """16 hex digits of what decides the training samples, and after a hyphen 16 of the evaluation samples, if any."""
    return "-".join(xxhash.xxh3_64_hexdigest(json.dumps(p, sort_keys=True, default=str).encode()) for p in parts)


def content_fingerprint(
    schema: Schema, checksums: Sequence[Sequence[str]], transform: Sequence[Sequence[float]]
) -> str:
    """That of stored samples: their checksums (train, maybe eval), the names of columns, the scaling.

    Tables and pooling are the model's, not the data's. The part of each list that is kept is the data's.
    """
    common = {"dense": schema.dense, "sparse": [f.name for f in schema.features], "transform": transform}
    common |= {"labels": schema.labels} if schema.tasks else {}
    if schema.sequences:
        kept = [[g.name, [c.name for c in g.ids], g.numbers, g.max_length, g.newest] for g in schema.sequences]
        common["sequences"] = kept
    return fingerprint(*(common | {"checksum": checksum} for checksum in checksums))


def doubtful_weights(dataset: Dataset) -> list[str]:
    """A warning for each feature whose weights are large, by samples from all over the data set; reads them."""
    weighted = [feature.name for feature in dataset.schema.features if feature.pooling == "weighted"]
    if not weighted or not len(dataset):
        return []
    bags, warnings = dataset.gather(_spread(dataset, _WEIGHT_SAMPLES)).ids, []
    for name in weighted:
        weights_N = bags[name].weights_N
        if weights_N is None or not weights_N.size:
            continue
        rms = float(np.sqrt(np.mean(np.square(weights_N, dtype=np.float64))))
        if LARGEST_RMS < rms < np.inf:
            warnings.append(
                f"feature {name}: its weights have a root mean square of {rms:.3g}, so its pooled rows are about that "
                "many times too long; scale the weights to about 1, or use pooling: mean"
            )
    return warnings
