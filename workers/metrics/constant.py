"""The constant prediction that a model of numbers has to beat: the mean of the training labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASELINE = "baseline_"
"""Before the name of an error: the same error of the constant mean."""
ERRORS = ("mse", "rmse", "mae")


def loses_to_the_mean(metrics: Mapping[str, Any]) -> str | None:
    """Both errors, in words, where every error of an evaluation is above the constant mean's; else None."""
    pairs = [
        (name, float(metrics[name]), float(metrics[BASELINE + name]))
        for name in metrics
        if metrics[name] is not None and metrics.get(BASELINE + name) is not None
    ]
    if not pairs or any(error <= baseline for _, error, baseline in pairs):
        return None
    name, error, baseline = next((pair for pair in pairs if pair[0].startswith("rmse")), pairs[0])
    return f"{name.upper()} {error:.6g}, the constant mean of the training labels has {baseline:.6g}"
