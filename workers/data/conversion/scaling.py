"""Scaling of dense columns: what is stored, and statistics over the training rows in float64.

N = rows of a chunk, I = dense columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s
from shardkeep.workers.data.columnar import DenseTransform
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


@dataclass(frozen=True)
class PriorScale:
    """How an earlier model reads a dense column: (stored - shift) * factor, stored = shaped - origin."""

    is_time: bool
    origin: float
    fill: float
    shift: float
    factor: float


class ColumnScaler:
    """One column of numbers: stores log or plain values around an origin as float32, learns mean and deviation.

    The origin (of standardised columns: the first training chunk's mean) keeps float32 precise for columns like
    timestamps, whose values are large beside their spread. `is_time`: None before a value is known.
    """

    def __init__(self, column: DenseColumn | SequenceNumber, default: Scaling, kept: PriorScale | None = None) -> None:
        self.name = column.column
        self.is_time = None if kept is None else kept.is_time
        self._scale: Scaling = column.scale or default
        self._fill = column.fill
        self._raw = Moments()
        self._stored = Moments()
        self._kept = kept
        self._has_gaps = False
        self._origin = None if kept is None else kept.origin

    def store(self, values_N: Float64s, *, learn: bool) -> NDArray[np.float32]:
        """The numbers to store for raw `values_N` (nan = missing); with `learn` they count as training data."""
        shaped_N = self._shape(values_N)
        present_N = ~np.isnan(values_N)
        if learn:
            self._has_gaps |= not present_N.all()
            self._raw.add(values_N[present_N])
            self._stored.add(shaped_N[present_N])
        if self._origin is None and present_N.any():
            self._origin = self._stored.mean if self._standard else 0.0
        with np.errstate(over="ignore"):  # the caller refuses what became infinite
            return (shaped_N - self.origin).astype(np.float32)

    @property
    def origin(self) -> float:
        """What is subtracted from every number before it is stored."""
        return self._origin or 0.0

    @property
    def is_known(self) -> bool:
        """Whether a training row has a number."""
        return self._raw.count > 0

    @property
    def is_constant(self) -> bool:
        """Whether all training rows have one input: one number, and a missing one is no other."""
        told_apart = self.is_known and self._has_gaps and self._fill != "mean"
        return self._kept is None and self._stored.deviation == 0.0 and not told_apart

    def transform(self) -> tuple[float, float, float]:
        """(fill, shift, factor): the input is (stored - shift) * factor, or fill where missing. A column that is
        constant in training is 0 also where it varies later."""
        if self._kept is not None:
            return self._kept.fill, self._kept.shift, self._kept.factor
        if self.is_constant:
            return 0.0, 0.0, 0.0
        raw = self._raw.mean if self._fill == "mean" else float(self._fill)
        origin = self.origin
        shift, factor = 0.0, 1.0
        if self._standard:
            shift, factor = self._stored.mean - origin, 1.0 / (self._stored.deviation or 1.0)
        fill = (float(self._shape(np.array([raw]))[0]) - origin - shift) * factor
        return fill, shift, factor

    @property
    def _standard(self) -> bool:
        return self._scale in ("standard", "log_standard")

    def _shape(self, values_N: Float64s) -> Float64s:
        if self._scale in ("log", "log_standard"):
            return np.asarray(np.sign(values_N) * np.log1p(np.abs(values_N)), np.float64)
        return values_N


def transform_of(columns: Sequence[ColumnScaler]) -> DenseTransform:
    """The transform of all columns as float32 arrays."""
    fill_shift_factor = np.array([c.transform() for c in columns], np.float32).reshape(-1, 3)
    return DenseTransform(*(np.ascontiguousarray(part) for part in fill_shift_factor.T))


def to_json(transform: DenseTransform) -> dict[str, list[float]]:
    """The transform as plain lists; float32 numbers survive JSON exactly."""
    return {name: [float(x) for x in values] for name, values in asdict(transform).items()}


def from_json(record: dict[str, Any]) -> DenseTransform:
    """Undoes `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    return DenseTransform(*(np.array(record[k], np.float32) for k in ("fill_I", "shift_I", "factor_I")))
