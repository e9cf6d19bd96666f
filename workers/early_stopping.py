"""Settings of what evaluations decide: early stopping and the plateau schedule. Apart from the code: needs no torch."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.settings import Settings

METRIC_SIGNS = {
    "auc": 1, "gauc": 1, "accuracy": 1, "precision": 1, "recall": 1, "r2": 1,
    "logloss": -1, "normalized_entropy": -1, "mse": -1, "mae": -1, "rmse": -1,
}  # fmt: skip
"""Metrics by which a model can be chosen, and whether more is better (1) or less (-1)."""


class _Watched(Settings):
    """A metric that is to improve."""

    metric: str = "auc"
    """Metric of evaluation; more is better for auc, less for logloss. METRIC/LABEL for a model of several labels."""
    min_delta: float = Field(0.0, ge=0.0, le=1e6)
    """An evaluation improves if it is better than the best one by more than this."""

    @field_validator("metric")
    @classmethod
    def _can_be_compared(cls, value: str) -> str:
        if value.partition("/")[0] not in METRIC_SIGNS:
            raise ValueError(f"allowed: {', '.join(METRIC_SIGNS)}, or METRIC/LABEL")
        return value


class EarlyStoppingConfig(_Watched):
    """Ends the job once evaluations no longer improve, and keeps the best model."""

    patience: int = Field(2, ge=1, le=1_000_000)
    """Evaluations in a row that do not improve, after which the job ends."""


class PlateauConfig(_Watched):
    """Lowers the learning rates of dense model and rows once evaluations no longer improve."""

    patience: int = Field(1, ge=1, le=1_000_000)
    """Evaluations in a row that do not improve, after which the rates fall; then the count starts at 0."""
    factor: float = Field(0.1, gt=0.0, lt=1.0)
    """Multiplies the learning rates each time they fall."""
    min_factor: float = Field(0.001, ge=1e-30, le=1.0)
    """The least factor on the learning rates."""
