"""Calibration: how a model's probabilities agree with the labels, as points of curves for the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkeep.inference.scoring import EvaluationScores
from shardkeep.workers.metrics.quality import Predictions, calibration_buckets_of

BINS = 20
"""Of probabilities from 0 to 1."""


def quality_of(scores: EvaluationScores) -> dict[str, Any] | None:
    """`calibration`: mean probability and mean label of ten buckets of rows. `scores`: by label, the middle of each bin
    of probabilities with the share of the label's rows, by weight. None for scores that are not `binary`, or none."""
    if not scores.binary or not len(scores.labels_NT):
        return None
    logits_N, label_N = scores.outputs_NT[:, 0].astype(np.float64), scores.labels_NT[:, 0].astype(np.float64)
    scored = Predictions(logits_N, label_N, scores.weights_N if len(scores.weights_N) else np.ones(len(label_N)))
    shares = {}
    for label in (0, 1):
        own_N = scored.weight_N * ((label_N > 0.5) == label)
        counts, edges = np.histogram(scored.predictions, BINS, (0.0, 1.0), weights=own_N)
        shares[str(label)] = np.stack([edges[:-1] + 0.5 / BINS, counts / (own_N.sum() or 1)], axis=1).tolist()
    points = [[bucket["prediction"], bucket["label"]] for bucket in calibration_buckets_of(scored)]
    return {"calibration": points, "scores": shares}
