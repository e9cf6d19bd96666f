"""Scaling of columns of numbers: statistics over the training rows in float64, and what turns numbers into inputs.

N = rows of a chunk
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.workers.data.columns.column import StoredColumn
from shardkeep.workers.data.columns.column_kernels import take_inputs
from shardkeep.workers.data_config import DenseColumn, Scaling, SequenceNumber


@dataclass
class Moments:
    """Running count, mean and sum of squared deviations (Chan, Golub, LeVeque 1979), of present values only."""

    count: int = 0
    mean: float = 0.0
    spread: float = 0.0

    def add(self, values: Float64s) -> None:
        """Takes in a chunk's present values."""
        if not len(values):
            return
        mean = float(values.mean())
        total = self.count + len(values)
        delta = mean - self.mean
        with np.errstate(over="ignore"):  # of raw values that only their logarithm makes usable
            between = np.float64(delta) ** 2 * (self.count * len(values) / total) if self.count else 0.0
            self.spread += float(np.square(values - mean).sum() + between)
        self.mean += delta * len(values) / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation (population); 0 where all values are equal, up to rounding."""
        deviation = float(np.sqrt(self.spread / self.count)) if self.count else 0.0
        return deviation if deviation > 1e-12 * max(1.0, abs(self.mean)) else 0.0


class Scale(NamedTuple):
    """What turns the numbers of a column into inputs: (float32(x - origin) - shift) * factor, or fill where missing.

    Of a column with a logarithm x is sign(x) * log(1 + |x|). The origin (of standardized columns: the mean of the first
    training rows) keeps float32 precise where values are large beside their spread, as times are."""

    origin: float
    fill: float
    shift: float
    factor: float


def has_log(column: DenseColumn | SequenceNumber, default: Scaling) -> bool:
    """Whether the inputs of a column are logarithms."""
    return (column.scale or default) in ("log", "log_standard")


def fit(column: DenseColumn | SequenceNumber, default: Scaling, chunks: Iterable[Float64s]) -> tuple[Scale, str | None]:
    """The scale of a column by the numbers of its training rows, nan = missing; and why it teaches nothing, or None.

    A column that is constant in training is 0 also where it varies later."""
    scale, log, raw, shaped = column.scale or default, has_log(column, default), Moments(), Moments()
    standard, has_gaps, origin = scale in ("standard", "log_standard"), False, None
    for values_N in chunks:
        present_N = ~np.isnan(values_N)
        has_gaps |= not present_N.all()
        values_N = values_N[present_N]
        raw.add(values_N)
        shaped.add(_logarithms(values_N) if log else values_N)
        if origin is None and len(values_N):
            origin = shaped.mean if standard else 0.0
    told_apart = raw.count and has_gaps and column.fill != "mean"
    if shaped.deviation == 0.0 and not told_apart:
        why = "has the same number in all rows" if raw.count else "is empty"
        return Scale(origin or 0.0, 0.0, 0.0, 0.0), why
    origin, filled = origin or 0.0, np.array([raw.mean if column.fill == "mean" else float(column.fill)])
    shift, factor = (shaped.mean - origin, 1.0 / (shaped.deviation or 1.0)) if standard else (0.0, 1.0)
    fill = (float((_logarithms(filled) if log else filled)[0]) - origin - shift) * factor
    return Scale(origin, *map(float, np.array([fill, shift, factor], np.float32))), None


def _logarithms(values_N: Float64s) -> Float64s:
    return np.asarray(np.sign(values_N) * np.log1p(np.abs(values_N)), np.float64)


def inputs_into(transform: tuple[bool, Scale], numbers_V: Any, places_B: Ints, out_B: Floats) -> None:
    """The inputs of some of a column's numbers. `transform`: whether they are logarithms, and the scale."""
    log, scale = transform
    fill, shift, factor = map(np.float32, scale[1:])
    take_inputs(numbers_V, places_B, log, scale.origin, fill, shift, factor, out_B)


def chunks_of_rows(column: StoredColumn, rows_N: Ints | None, at: int) -> Iterable[Float64s]:
    """The numbers of some rows, None = of all, in chunks of 65,536 rows or fewer, of which the first are the rows
    that were read first. `at`: which number of a vector."""
    size, first, values = (
        1 << 16,
        column.facts["first"],
        column.values if column.values.ndim == 1 else column.values[:, at],
    )
    borders = np.unique([0, min(first, len(column)), *range(first, len(column), size), len(column)])
    for start, stop in itertools.pairwise(borders.tolist()):
        own_B = np.arange(start, stop)
        if rows_N is not None:
            own_B = rows_N[slice(*np.searchsorted(rows_N, (start, stop)))]
        places_B = own_B if column.offsets is None else column.entries(np.ascontiguousarray(own_B), 1 << 31)[0]
        yield values[places_B].astype(np.float64)
