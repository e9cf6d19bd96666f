"""Importance: what each column of a model's inputs is worth, in the metric that the job watches.

The worth of a column is what the metric loses when the column's values are permuted within the evaluation rows
(Breiman, "Random Forests", Machine Learning 45, 2001). Columns that say the same are each worth little: the
other one is left.
"""

# B = rows asked for, N = rows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import UserError
from shardkeep.base.plugging.packages import missing
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.files import Told
from shardkeep.inference.scoring import EvaluationRows
from shardkeep.workers.config import sign_of
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.schema import Schema

REPEATS = 5
"""Permutations of each column."""
FILE = "importance.png"


@dataclass(frozen=True, slots=True)
class Worth:
    """What the metric loses without one column, in each of `REPEATS` permutations."""

    column: str
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation of the permutations."""
        return stdev(self.losses)


@dataclass(frozen=True, slots=True)
class Importance:
    """The worth of all columns, the largest first. `value`: of the metric with all columns."""

    metric: str
    value: float
    columns: tuple[Worth, ...]

    def as_json(self) -> dict[str, Any]:
        columns = [{"column": w.column, "mean": w.mean, "spread": w.spread, "losses": w.losses} for w in self.columns]
        return {"metric": self.metric, "value": self.value, "columns": columns}


@dataclass(frozen=True)
class Permuted:
    """A data set in which one column, or all columns of a sequence, have the values of other rows."""

    dataset: Dataset
    column: str
    order_N: Ints
    """The row that gives row i its value."""

    @cached_property
    def schema(self) -> Schema:
        return self.dataset.schema

    def __len__(self) -> int:
        return len(self.order_N)

    def gather(self, rows_B: Ints) -> Batch:
        own, other = (gathered(self.dataset, rows) for rows in (rows_B, self.order_N[rows_B]))
        names = {self.column}
        for group in self.schema.sequences:
            names |= {column.name for column in group.ids} if group.name == self.column else set()
        dense_BI = own.dense_BI.copy()
        permuted_I = [name in names for name in self.schema.dense]
        dense_BI[:, permuted_I] = other.dense_BI[:, permuted_I]
        ids = {name: (other if name in names else own).ids[name] for name in own.ids}
        numbers = {name: (other if name in names else own).numbers[name] for name in own.numbers}
        return replace(own, dense_BI=dense_BI, ids=ids, numbers=numbers)


def importance_of(rows: EvaluationRows, told: Told) -> Importance:
    """The importance of each column, from rows that can be read several times. Raises UserError: the metric is
    undefined."""
    schema, config = rows.trained.schema, rows.trained.config
    rows = replace(rows, told=lambda _text, _share: None)
    found, watched = rows.scores().metrics(), config.train.early_stopping
    metric = watched.metric if watched is not None else next(name for name in found if sign_of(name) is not None)
    if (value := found.get(metric)) is None:
        raise UserError(f"--importance: {metric} is undefined ({found.get('note', 'it is not evaluated')})")
    groups = [group.name for group in schema.sequences]
    columns = list(dict.fromkeys([*schema.dense, *(feature.name for feature in schema.features), *groups]))
    worths = []
    for at, column in enumerate(columns):
        told(f"importance of {column}", at / len(columns))
        losses = [(sign_of(metric) or 1) * (value - one.scores().metrics()[metric]) for one in _permuted(rows, column)]
        worths.append(Worth(column, tuple(losses)))
    return Importance(metric, value, tuple(sorted(worths, key=lambda worth: -worth.mean)))


def _permuted(rows: EvaluationRows, column: str) -> Iterator[EvaluationRows]:
    for repeat in range(REPEATS):
        draw, datasets = np.random.default_rng(repeat), []
        for dataset in rows.datasets:
            count = min(len(dataset), rows.most or len(dataset))
            datasets.append(Permuted(dataset, column, draw.permutation(count)))
        yield replace(rows, datasets=datasets)


def write_picture(found: Importance, run: Path) -> Path | None:
    """Draws the worth of each column with its spread into a file of the run folder. None = matplotlib is not installed,
    or it is an export, which nothing is added to. Raises OSError."""
    if missing("matplotlib") or is_export(run):
        return None
    from matplotlib.figure import Figure

    shown = found.columns[::-1]
    figure = Figure(figsize=(7, 1 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    bars = [worth.mean for worth in shown], [worth.spread for worth in shown]
    axes.barh([worth.column for worth in shown], bars[0], xerr=bars[1], color="#0072b2", ecolor="#000000")
    axes.set_xlabel(f"what {found.metric} loses when the column is permuted; bars: spread of {REPEATS} permutations")
    axes.axvline(0.0, color="#999999", linewidth=1)
    figure.savefig(run / FILE, dpi=150)
    return run / FILE
