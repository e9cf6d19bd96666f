"""Calibration: how a model's probabilities agree with the labels, as points of curves for the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkeep.inference.scoring import EvaluationScores
from shardkeep.workers.metrics.quality import Predictions, calibration_buckets_of

BINS = 20
"""Of probabilities from 0 to 1."""


def quality_of(scores: EvaluationScores) -> dict[str, Any] | None:
    """Points of two plots; None unless there is one label of 0 and 1, with finite scores.

    Returns:
        `calibration`: mean probability and mean label of ten buckets of rows. `scores`: by label, the middle of each
        bin of probabilities with the share of the label's rows, by weight."""
    if not scores.binary or not len(scores.outputs_NT) or not np.isfinite(scores.outputs_NT).all():
        return None
    logits_N, labels_N = (values[:, 0].astype(np.float64) for values in (scores.outputs_NT, scores.labels_NT))
    weights_N = scores.weights_N if len(scores.weights_N) else np.ones(len(labels_N), np.int64)
    scored = Predictions(logits_N, labels_N, weights_N)
    points = [[bucket["prediction"], bucket["label"]] for bucket in calibration_buckets_of(scored)]
    shares = {}
    for label in (0, 1):
        own_N = (labels_N > 0.5) == label
        counts, edges = np.histogram(scored.predictions[own_N], BINS, (0.0, 1.0), weights=weights_N[own_N])
        shares[str(label)] = [
            [(a + b) / 2, n / (counts.sum() or 1)] for a, b, n in zip(edges, edges[1:], counts, strict=False)
        ]
    return {"calibration": points, "scores": shares}
