"""Importance: what each column of a model's inputs is worth, in the metric that the job watches: what the metric loses
when the column is permuted within the evaluation rows (Breiman, "Random Forests", Machine Learning 45, 2001)."""

# B = rows asked for, N = rows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Permuted:
    """A data set in which row i has the value of row `order_N[i]` in one column, or in all columns of a sequence."""

    dataset: Dataset
    column: str
    order_N: Ints

    @property
    def schema(self) -> Schema:
        return self.dataset.schema

    def __len__(self) -> int:
        return len(self.order_N)

    def gather(self, rows_B: Ints) -> Batch:
        own, other = (gathered(self.dataset, rows) for rows in (rows_B, self.order_N[rows_B]))
        group = [c.name for group in self.schema.sequences if group.name == self.column for c in group.ids]
        names = {self.column, *group}
        permuted_I = [name in names for name in self.schema.dense]
        ids = {name: (other if name in names else own).ids[name] for name in own.ids}
        numbers = {name: (other if name in names else own).numbers[name] for name in own.numbers}
        return replace(own, dense_BI=np.where(permuted_I, other.dense_BI, own.dense_BI), ids=ids, numbers=numbers)


def importance_of(rows: EvaluationRows, told: Told) -> dict[str, Any]:
    """The `metric`, its `value`, and of each of the `columns`, the best first, the `mean` of what it is worth and the
    `spread`, the standard deviation of `REPEATS` permutations. Raises UserError where the metric is undefined.

    `rows`: can be read several times."""
    schema, watched = rows.trained.schema, rows.trained.config.train.early_stopping
    found = rows.scores().metrics()
    metric = next((name for name in found if sign_of(name) is not None), "auc") if watched is None else watched.metric
    if (value := found.get(metric)) is None:
        raise UserError(f"--importance: {metric} is undefined ({found.get('note', 'it is not evaluated')})")
    groups = [group.name for group in schema.sequences]
    columns, worth = list(dict.fromkeys([*schema.dense, *(f.name for f in schema.features), *groups])), []
    for at, column in enumerate(columns):
        told(f"importance of {column}", at / len(columns))
        lost = [(sign_of(metric) or 1) * (value - each.scores().metrics()[metric]) for each in _permuted(rows, column)]
        worth.append({"column": column, "mean": fmean(lost), "spread": stdev(lost)})
    return {"metric": metric, "value": value, "columns": sorted(worth, key=lambda one: -one["mean"])}


def _permuted(rows: EvaluationRows, column: str) -> Iterator[EvaluationRows]:
    for repeat in range(REPEATS):
        draw = np.random.default_rng(repeat)
        counts = [(each, min(len(each), rows.most or len(each))) for each in rows.datasets]
        datasets = [Permuted(each, column, draw.permutation(count)) for each, count in counts]
        yield replace(rows, datasets=datasets, told=lambda _text, _share: None)


def write_picture(found: dict[str, Any], run: Path) -> Path | None:
    """Draws the worth of columns with its spread into a file of the run folder. None = matplotlib is not installed, or
    it is an export, which nothing is added to. Raises OSError."""
    if missing("matplotlib") or is_export(run):
        return None
    from matplotlib.figure import Figure

    columns = found["columns"][::-1]
    names, means, spreads = ([one[key] for one in columns] for key in ("column", "mean", "spread"))
    figure = Figure(figsize=(7, 1 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, means, xerr=spreads, color="#0072b2")
    axes.set_xlabel(f"{found['metric']} that the column is worth, and the spread of {REPEATS} permutations")
    figure.savefig(run / FILE, dpi=150)
    return run / FILE
