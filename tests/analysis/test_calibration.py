"""Calibration: the points of two plots, from scores of evaluation rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardkeep.analysis.calibration import BINS, quality_of
from shardkeep.base.arrays import Floats
from shardkeep.inference.scoring import EvaluationScores
from shardkeep.workers.metrics.quality import MetricSettings
from tests.support.cases import every


def scores_of(chances_N: Floats, labels_N: Floats, **changes: Any) -> EvaluationScores:
    logits_NT = np.log(chances_N / (1 - chances_N)).astype(np.float32)[:, None]
    none, empty = np.empty(0, np.int64), np.empty(0, np.float32)
    return replace(EvaluationScores(logits_NT, labels_N[:, None], none, empty, MetricSettings()), **changes)


def test_a_model_that_is_right_has_points_on_the_diagonal() -> None:
    draw = np.random.default_rng(0)
    chances_N = draw.uniform(0.01, 0.99, 20_000).astype(np.float32)
    labels_N = (draw.random(20_000) < chances_N).astype(np.float32)
    found = quality_of(scores_of(chances_N, labels_N))
    assert found is not None and len(found["calibration"]) == 10
    assert all(abs(share - chance) < 0.04 for chance, share in found["calibration"])
    high = quality_of(scores_of(chances_N**0.5, labels_N))
    assert high is not None and all(share < chance for chance, share in high["calibration"])


def test_the_shares_of_each_label_are_in_the_bins_of_their_probabilities() -> None:
    chances_N, labels_N = np.array([0.11, 0.12, 0.93, 0.11], np.float32), np.array([0, 0, 0, 1], np.float32)
    found = quality_of(scores_of(chances_N, labels_N))
    assert found is not None
    shares = {label: {round(x, 3): share for x, share in bins if share} for label, bins in found["scores"].items()}
    assert shares == {"0": {0.125: pytest.approx(2 / 3), 0.925: pytest.approx(1 / 3)}, "1": {0.125: 1.0}}
    weighted = quality_of(scores_of(chances_N, labels_N, weights_N=np.array([1, 1, 2, 1], np.float32)))
    assert weighted is not None and max(share for _, share in weighted["scores"]["0"]) == pytest.approx(0.5)
    assert all(len(bins) == BINS for bins in found["scores"].values())


@every("why", ["numbers", "no rows", "not finite"])
def test_other_scores_have_no_plots(why: str) -> None:
    whole = scores_of(np.array([0.2, 0.6], np.float32), np.array([0, 1], np.float32))
    changed = {
        "numbers": replace(whole, asked=MetricSettings(numbers=True)),
        "no rows": replace(whole, outputs_NT=whole.outputs_NT[:0], labels_NT=whole.labels_NT[:0]),
        "not finite": replace(whole, outputs_NT=np.array([[np.nan], [1.0]], np.float32)),
    }
    assert quality_of(whole) is not None and quality_of(changed[why]) is None
