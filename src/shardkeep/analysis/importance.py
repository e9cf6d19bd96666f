"""Importance: what each column of a model's inputs is worth, in the metric that the job watches: what the metric loses
when the column is permuted within the evaluation rows (Breiman, "Random Forests", Machine Learning 45, 2001)."""

# B = rows asked for, N = rows

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from shardkeep.base.errors import UserError
from shardkeep.base.plugging.packages import missing
from shardkeep.base.printable import printable
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.files import Told
from shardkeep.inference.scoring import EvaluationRows, EvaluationScores, Scores
from shardkeep.workers.config import sign_of
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import gathered
from shardkeep.workers.data.schema import Schema

REPEATS = 5
"""Permutations of each column."""
FILE = "importance.png"


def exchanged(own: Batch, other: Batch, schema: Schema, column: str) -> Batch:
    """A batch with the values of another one in one column, or in all columns of a sequence."""
    group = [c.name for group in schema.sequences if group.name == column for c in group.ids]
    names = {column, *group}
    other_I = [name in names for name in schema.dense]
    ids = {name: (other if name in names else own).ids[name] for name in own.ids}
    numbers = {name: (other if name in names else own).numbers[name] for name in own.numbers}
    return replace(own, dense_BI=np.where(other_I, other.dense_BI, own.dense_BI), ids=ids, numbers=numbers)


def importance_of(rows: EvaluationRows, told: Told) -> dict[str, Any]:
    """The `metric`, its `value`, and of each of the `columns`, the best first, the `mean` of what it is worth and the
    `spread`, the standard deviation of `REPEATS` permutations. Raises UserError where the metric is undefined.

    `rows`: can be read several times. `mean` and `spread`: None where permuted values leave the metric undefined."""
    schema, watched = rows.trained.schema, rows.trained.config.train.early_stopping
    found = rows.scores().metrics()
    metric = next((name for name in found if sign_of(name) is not None), "auc") if watched is None else watched.metric
    if (value := found.get(metric)) is None:
        raise UserError(f"--importance: {metric} is undefined ({found.get('note', 'it is not evaluated')})")
    groups = [group.name for group in schema.sequences]
    columns = list(dict.fromkeys([*schema.dense, *(f.name for f in schema.features), *groups]))
    lost = {column: list[float]() for column in columns}
    for repeat in range(REPEATS):

        def tell(_text: str, share: float, repeat: int = repeat) -> None:
            told(f"importance, permutation {repeat + 1} of {REPEATS}", (repeat + share) / REPEATS)

        for column, scores in _permuted(replace(rows, told=tell), columns, repeat):
            if (permuted := scores.metrics()[metric]) is not None:
                lost[column].append((sign_of(metric) or 1) * (value - permuted))
    figures = {column: (fmean(each), stdev(each)) for column, each in lost.items() if len(each) == REPEATS}
    ordered = sorted(columns, key=lambda column: -figures[column][0] if column in figures else math.inf)
    worth = [
        dict(zip(("column", "mean", "spread"), (each, *figures.get(each, (None, None))), strict=True))
        for each in ordered
    ]
    return {"metric": metric, "value": value, "columns": worth}


def _permuted(rows: EvaluationRows, columns: Sequence[str], repeat: int) -> Iterator[tuple[str, EvaluationScores]]:
    """The scores with each column permuted. Gathers every batch twice, for all columns, and holds all scores."""
    draw, parts = np.random.default_rng(repeat), {column: list[Scores]() for column in columns}
    for dataset in rows.datasets:
        order_N = draw.permutation(rows.count(dataset))
        for rows_B in rows.blocks(dataset):
            own, other = gathered(dataset, rows_B), gathered(dataset, order_N[rows_B])
            for column, found in parts.items():
                found.append(rows.scored(exchanged(own, other, dataset.schema, column), own))
    for column, found in parts.items():
        yield column, rows.joined(found)


def write_picture(found: dict[str, Any], run: Path) -> Path | None:
    """Draws the worth of columns with its spread into a file of the run folder. None = matplotlib is not installed, or
    it is an export, which nothing is added to. Raises OSError."""
    if missing("matplotlib") or is_export(run):
        return None
    from matplotlib.figure import Figure

    columns = [one for one in found["columns"][::-1] if one["mean"] is not None]
    names, means, spreads = ([one[key] for one in columns] for key in ("column", "mean", "spread"))
    figure = Figure(figsize=(7, 1 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    label = f"{found['metric']} that the column is worth, and the spread of {REPEATS} permutations"
    *shown, label = (printable(text).replace("$", r"\$") for text in (*names, label))  # no formulas
    axes.barh(shown, means, xerr=spreads, color="#0072b2")
    axes.set_xlabel(label)
    figure.savefig(run / FILE, dpi=150)
    return run / FILE
